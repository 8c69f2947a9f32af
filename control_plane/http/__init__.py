"""The HTTP surface, OpenAI's and Anthropic's APIs, in the control plane's process (extra `http`).

Only `server` and `backend` do without FastAPI: the rest is imported once there is a port to serve.
"""
