"""The gRPC edge of the compute plane; protobuf goes no further than `convert`."""
