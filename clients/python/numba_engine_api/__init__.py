"""The generated code of the gRPC API; made by proto/generate.sh from proto/numba_engine_api."""
