"""What clients speak: gRPC servicers, conversions, one error table, interceptors."""
