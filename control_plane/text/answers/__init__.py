"""The parts of a chat model's answer: what it says, what it thinks, the tools it calls.

Pure: text in, parts out, however the text is cut.
"""
