"""A server of the API whose answers the test writes down beforehand: what the clients are held against."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from numba_engine_api.v1 import inference_pb2 as pb
from numba_engine_api.v1 import inference_pb2_grpc

Behaviour = Callable[[Any, grpc.ServicerContext], Any]

USAGE = pb.Usage(prompt_tokens=5, cached_prompt_tokens=2, completion_tokens=3)
TIMINGS = pb.Timings(queue_s=0.001, ttft_s=0.05, prefill_s=0.04, decode_s=0.02, mean_inter_token_s=0.01)


@dataclass
class FakeService(inference_pb2_grpc.InferenceServiceServicer):
    """Notes every request and its metadata; answers by ``behaviours``, name of the method to function."""

    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when a stream ended because its client left."""

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        try:
            yield from self._answer("Generate", request, context)
        finally:
            if not context.is_active():
                self.cancelled.set()

    def Profile(self, request: pb.ProfileRequest, context: grpc.ServicerContext) -> Iterator[pb.ProfileResponse]:
        yield from self._answer("Profile", request, context)

    def EstimateThroughput(
        self, request: pb.EstimateThroughputRequest, context: grpc.ServicerContext
    ) -> pb.EstimateThroughputResponse:
        return self._answer("EstimateThroughput", request, context)

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        return self._answer("Tokenize", request, context)

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        return self._answer("Detokenize", request, context)

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext) -> pb.GetModelInfoResponse:
        return self._answer("GetModelInfo", request, context)

    def GetStatus(self, request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.GetStatusResponse:
        return self._answer("GetStatus", request, context)

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        return self._answer("Abort", request, context)

    def _answer(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        return self.behaviours[method](request, context)


@contextmanager
def serving(service: FakeService, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """The target of a server on a free loopback port."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    checks = health.HealthServicer()
    checks.set("numba_engine_api.v1.InferenceService", health_pb2.HealthCheckResponse.NOT_SERVING)
    checks.set("liveness", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait(5)


def refuse(context: grpc.ServicerContext, code: int, message: str, *details: Message) -> None:
    """End the call with a ``google.rpc.Status``."""
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    context.abort_with_status(rpc_status.to_status(status_pb2.Status(code=code, message=message, details=packed)))


def refuse_full(context: grpc.ServicerContext, retry_delay_s: float) -> None:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(round(retry_delay_s * 1000))
    refuse(context, code_pb2.RESOURCE_EXHAUSTED, "the queue is full", error_details_pb2.RetryInfo(retry_delay=delay))


def refuse_field(context: grpc.ServicerContext, path: str, description: str) -> None:
    bad = error_details_pb2.BadRequest(
        field_violations=[error_details_pb2.BadRequest.FieldViolation(field=path, description=description)]
    )
    known_as = error_details_pb2.RequestInfo(request_id="req-17")
    refuse(context, code_pb2.INVALID_ARGUMENT, f"{path}: {description}", bad, known_as)


def started(request_id: str = "req-1", prompt_token_ids: tuple[int, ...] = ()) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.GenerationStarted(request_id=request_id, prompt_token_count=5, prompt_token_ids=prompt_token_ids)
    )


def delta(text: str, *token_ids: int, logprobs: tuple[pb.PositionLogprobs, ...] = ()) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.GenerationDelta(text=text, token_ids=token_ids, logprobs=logprobs))


def finished(reason: Any = pb.FINISH_REASON_MAX_TOKENS, **more: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        finished=pb.GenerationFinished(finish_reason=reason, usage=USAGE, timings=TIMINGS, **more)
    )


def answer(*texts: str) -> Behaviour:
    """A Generate that streams these texts, token ids counting from 10."""

    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield started(prompt_token_ids=(1, 2, 3, 4, 5) if request.include_prompt_token_ids else ())
        for index, text in enumerate(texts):
            yield delta(text, 10 + index)
        yield finished()

    return generate


def endless(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """A Generate that goes on until its client leaves (or 1000 tokens, for a client that never does)."""
    yield started()
    for index in range(1000):
        if not context.is_active():
            return
        yield delta(f"{index} ", index)
        threading.Event().wait(0.01)


def op(name: str, time_s: float, weight_bytes: int) -> pb.OpProfile:
    return pb.OpProfile(
        name=name,
        num_calls=30,
        time_s=time_s,
        weight_bytes=weight_bytes,
        activation_bytes=1000,
        flops=2 * weight_bytes,
        gbps=(weight_bytes + 1000) / time_s / 1e9,
        intensity=2 * weight_bytes / (weight_bytes + 1000),
        share_of_attainable=0.57,
        bound=pb.BOUND_MEMORY if weight_bytes else pb.BOUND_LATENCY,
        num_launches=30,
    )


def profile(request: pb.ProfileRequest, context: grpc.ServicerContext) -> Iterator[pb.ProfileResponse]:
    """A Profile of one prefill step and two decode steps."""
    ops = [op("linear", 0.003, 60_000_000), op("attention", 0.001, 0)]
    peaks = [
        pb.DevicePeak(name="read bandwidth", value=35.0, unit="GB/s", source=pb.FIGURE_SOURCE_MEASURED),
        pb.DevicePeak(name="int8 dot products", value=0.4, unit="TFLOPS", source=pb.FIGURE_SOURCE_MEASURED),
    ]
    yield pb.ProfileResponse(
        device=pb.ProfiledDevice(
            backend="cpu", name="EPYC", num_threads=2, time_source=pb.TIME_SOURCE_HOST_CLOCK, peaks=peaks
        )
    )
    yield pb.ProfileResponse(
        model=pb.ProfiledModel(
            name="tiny",
            architecture="llama",
            num_parameters=134_515_008,
            weight_bytes=98_000_000,
            weight_formats=["Q4_1", "Q8_0"],
        )
    )
    if request.HasField("live"):
        yield pb.ProfileResponse(waiting=pb.WaitingForTraffic())
    calls = [
        pb.OpCall(name="embedding", start_s=0.0, time_s=0.00002),
        *(pb.OpCall(name="linear", layer=i, start_s=0.001 * i, time_s=0.0005 + 0.0001 * i) for i in range(3)),
    ]
    for index, (prefill, decode) in enumerate(((5, 0), (0, 1), (0, 1))):
        step = pb.StepProfile(
            index=index,
            num_prefill_tokens=prefill,
            num_decode_tokens=decode,
            num_seqs=1,
            time_s=0.005,
            ops=ops,
            text=f" word{index}\n",
            calls=calls if request.detail == pb.PROFILE_DETAIL_TIMELINE else (),
            unprofiled=request.unprofiled_every > 0 and index == 2,
        )
        yield pb.ProfileResponse(step=step)
    yield pb.ProfileResponse(
        summary=pb.ProfileSummary(
            num_prefill_steps=1,
            num_decode_steps=2,
            prefill_tokens_per_s=1000.0,
            decode_tokens_per_s=200.0,
            read_bandwidth_gbps=35.0,
            bytes_per_token=98_000_000,
            floor_s=0.0028,
            share_of_floor=0.56,
            ops=[op("linear", 0.006, 120_000_000), op("attention", 0.002, 0)],
            shares=[
                pb.OpShare(name="linear", share=0.6),
                pb.OpShare(name="host", share=0.2),
                pb.OpShare(name="attention", share=0.2),
            ],
            finish_reason=pb.FINISH_REASON_MAX_TOKENS,
            usage=USAGE,
            weight_bytes_per_token=97_000_000,
            kv_bytes_per_token=1_000_000,
            decode_tokens_per_s_p10=190.0,
            decode_tokens_per_s_p90=205.0,
            decode_arithmetic_idle_share=0.875,
            launches_per_step=30,
            launch_gap_s_per_step=0.0002,
            host_s_per_step=0.001,
            overhead_s_per_step=0.00003,
            num_unprofiled_steps=1,
            unprofiled_step_s=0.0049,
            profiled_step_s=0.005,
            profiled_ops_s=0.004,
            memory=pb.MemoryUse(
                weight_bytes=98_000_000, kv_cache_bytes=10**9, kv_used_bytes=3 * 10**6, process_bytes=5 * 10**8
            ),
        )
    )


def estimates(request: pb.EstimateThroughputRequest, context: grpc.ServicerContext) -> pb.EstimateThroughputResponse:
    """Of each GPU that is asked for, or of two: 8 G parameters in fp16."""
    return pb.EstimateThroughputResponse(estimates=map(_estimate, request.gpus or ("rtx4090", "h200")))


def _estimate(gpu: str) -> pb.ThroughputEstimate:
    phase = pb.PhaseEstimate(
        time_per_token_s=0.0158730,
        tokens_per_s=63.0,
        pass_s=0.0158730,
        bound=pb.BOUND_MEMORY,
        memory_s=0.0158730,
        compute_s=0.0000969,
        weight_bytes=16e9,
        flops=16e9,
        share_of_tensor_peak=0.0061,
    )
    bandwidth = pb.DevicePeak(
        name="bandwidth", value=1008, unit="GB/s", source=pb.FIGURE_SOURCE_DATASHEET, citation="a whitepaper"
    )
    fp16 = pb.DevicePeak(name="fp16 tensor cores", value=165.2, unit="TFLOPS", source=pb.FIGURE_SOURCE_DATASHEET)
    return pb.ThroughputEstimate(
        model="8B parameters",
        num_parameters=8 * 10**9,
        weight_format="fp16",
        kv_format="fp16",
        batch=1,
        context=1024,
        tensor_parallel=1,
        gpu=pb.PlannedGpu(
            key=gpu, name=f"NVIDIA {gpu}", memory_bytes=24 << 30, memory_kind="GDDR6X", peaks=[bandwidth, fp16]
        ),
        decode=phase,
        prefill=phase,
        memory=pb.MemoryNeed(weight_bytes=16e9, total_bytes=16e9, available_bytes=24 << 30, fits=gpu != "h200"),
        machine_balance=164.0,
        decode_intensity=1.0,
        ridge_batch=164,
        levers=[
            pb.Lever(
                name="near-memory compute",
                change="4 × the bandwidth",
                metric="decode",
                tokens_per_s=252.0,
                factor=4.0,
                bound=pb.BOUND_MEMORY,
                memory_bytes=16e9,
                fits=True,
                source="a paper",
            )
        ],
        energy=[
            pb.EnergyLevel(level="registers", count=32e9, unit="bytes", picojoules=0.156, joules=0.04, source="a talk"),
            pb.EnergyLevel(
                level="arithmetic", count=8e9, unit="multiply-adds", picojoules=1.5, joules=0.012, source="a talk"
            ),
        ],
        joules_per_token=0.052,
        joules_per_token_at_tdp=7.14,
        notes=["KV cache is not counted"],
    )
