"""gRPC reflection under its name of today, v1, beside v1alpha, which is all that grpcio-reflection has.

The messages of the two are the same on the wire, so one servicer answers both.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1ALPHA = reflection.SERVICE_NAME
V1 = V1ALPHA.replace("v1alpha", "v1")


def add_reflection(service_names: Sequence[str], server: grpc.aio.Server) -> None:
    """Serves the descriptions of these services and of reflection itself."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*service_names, V1ALPHA, V1))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": handler}),))


def _describe_v1() -> None:
    """Puts the .proto file of v1, which is that of v1alpha but for its name, where descriptions are looked up."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        file.options.ClearField("deprecated")
        text = text_format.MessageToString(file).replace("v1alpha", "v1")
        pool.AddSerializedFile(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()).SerializeToString())
