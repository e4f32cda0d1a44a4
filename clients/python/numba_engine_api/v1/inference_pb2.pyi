from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_SEQUENCE: _ClassVar[FinishReason]
    FINISH_REASON_MAX_TOKENS: _ClassVar[FinishReason]
    FINISH_REASON_CONTEXT_FULL: _ClassVar[FinishReason]
    FINISH_REASON_TIME_LIMIT: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]

class ProfileDetail(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROFILE_DETAIL_UNSPECIFIED: _ClassVar[ProfileDetail]
    PROFILE_DETAIL_SUMMARY: _ClassVar[ProfileDetail]
    PROFILE_DETAIL_OPS: _ClassVar[ProfileDetail]
    PROFILE_DETAIL_TIMELINE: _ClassVar[ProfileDetail]

class TimeSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIME_SOURCE_UNSPECIFIED: _ClassVar[TimeSource]
    TIME_SOURCE_HOST_CLOCK: _ClassVar[TimeSource]
    TIME_SOURCE_DEVICE_EVENTS: _ClassVar[TimeSource]
    TIME_SOURCE_DEVICE_ACTIVITY: _ClassVar[TimeSource]
    TIME_SOURCE_SIMULATED: _ClassVar[TimeSource]

class FigureSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FIGURE_SOURCE_UNSPECIFIED: _ClassVar[FigureSource]
    FIGURE_SOURCE_DATASHEET: _ClassVar[FigureSource]
    FIGURE_SOURCE_MEASURED: _ClassVar[FigureSource]

class Bound(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BOUND_UNSPECIFIED: _ClassVar[Bound]
    BOUND_MEMORY: _ClassVar[Bound]
    BOUND_COMPUTE: _ClassVar[Bound]
    BOUND_LATENCY: _ClassVar[Bound]
    BOUND_INTERCONNECT: _ClassVar[Bound]

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_LOADING: _ClassVar[ServerState]
    SERVER_STATE_READY: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_FAILED: _ClassVar[ServerState]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_SEQUENCE: FinishReason
FINISH_REASON_MAX_TOKENS: FinishReason
FINISH_REASON_CONTEXT_FULL: FinishReason
FINISH_REASON_TIME_LIMIT: FinishReason
FINISH_REASON_ABORTED: FinishReason
PROFILE_DETAIL_UNSPECIFIED: ProfileDetail
PROFILE_DETAIL_SUMMARY: ProfileDetail
PROFILE_DETAIL_OPS: ProfileDetail
PROFILE_DETAIL_TIMELINE: ProfileDetail
TIME_SOURCE_UNSPECIFIED: TimeSource
TIME_SOURCE_HOST_CLOCK: TimeSource
TIME_SOURCE_DEVICE_EVENTS: TimeSource
TIME_SOURCE_DEVICE_ACTIVITY: TimeSource
TIME_SOURCE_SIMULATED: TimeSource
FIGURE_SOURCE_UNSPECIFIED: FigureSource
FIGURE_SOURCE_DATASHEET: FigureSource
FIGURE_SOURCE_MEASURED: FigureSource
BOUND_UNSPECIFIED: Bound
BOUND_MEMORY: Bound
BOUND_COMPUTE: Bound
BOUND_LATENCY: Bound
BOUND_INTERCONNECT: Bound
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_LOADING: ServerState
SERVER_STATE_READY: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_FAILED: ServerState

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "time_limit_s")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    time_limit_s: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ..., time_limit_s: _Optional[float] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "token_ids", "chat", "sampling", "include_prompt_token_ids", "include_token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: str
    token_ids: TokenIds
    chat: Chat
    sampling: SamplingParams
    include_prompt_token_ids: bool
    include_token_ids: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., include_prompt_token_ids: bool = ..., include_token_ids: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: GenerationStarted
    delta: GenerationDelta
    finished: GenerationFinished
    def __init__(self, started: _Optional[_Union[GenerationStarted, _Mapping]] = ..., delta: _Optional[_Union[GenerationDelta, _Mapping]] = ..., finished: _Optional[_Union[GenerationFinished, _Mapping]] = ...) -> None: ...

class GenerationStarted(_message.Message):
    __slots__ = ("request_id", "prompt_token_count", "prompt_token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_count: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_count: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerationDelta(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "text")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    text: str
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class GenerationFinished(_message.Message):
    __slots__ = ("finish_reason", "stop_sequence", "stop_token_id", "usage", "timings")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    stop_sequence: str
    stop_token_id: int
    usage: Usage
    timings: Timings
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_sequence: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_s", "ttft_s", "prefill_s", "decode_s", "mean_inter_token_s", "num_preemptions")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_INTER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    ttft_s: float
    prefill_s: float
    decode_s: float
    mean_inter_token_s: float
    num_preemptions: int
    def __init__(self, queue_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., mean_inter_token_s: _Optional[float] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class SyntheticWorkload(_message.Message):
    __slots__ = ("num_seqs", "prompt_len")
    NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    num_seqs: int
    prompt_len: int
    def __init__(self, num_seqs: _Optional[int] = ..., prompt_len: _Optional[int] = ...) -> None: ...

class LiveTraffic(_message.Message):
    __slots__ = ("num_steps",)
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    def __init__(self, num_steps: _Optional[int] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "token_ids", "chat", "synthetic", "live", "num_tokens", "fusion", "detail", "warm_up_steps", "unprofiled_every")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FUSION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    WARM_UP_STEPS_FIELD_NUMBER: _ClassVar[int]
    UNPROFILED_EVERY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: str
    token_ids: TokenIds
    chat: Chat
    synthetic: SyntheticWorkload
    live: LiveTraffic
    num_tokens: int
    fusion: bool
    detail: ProfileDetail
    warm_up_steps: int
    unprofiled_every: int
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., synthetic: _Optional[_Union[SyntheticWorkload, _Mapping]] = ..., live: _Optional[_Union[LiveTraffic, _Mapping]] = ..., num_tokens: _Optional[int] = ..., fusion: bool = ..., detail: _Optional[_Union[ProfileDetail, str]] = ..., warm_up_steps: _Optional[int] = ..., unprofiled_every: _Optional[int] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("device", "model", "step", "summary", "waiting")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    device: ProfiledDevice
    model: ProfiledModel
    step: StepProfile
    summary: ProfileSummary
    waiting: WaitingForTraffic
    def __init__(self, device: _Optional[_Union[ProfiledDevice, _Mapping]] = ..., model: _Optional[_Union[ProfiledModel, _Mapping]] = ..., step: _Optional[_Union[StepProfile, _Mapping]] = ..., summary: _Optional[_Union[ProfileSummary, _Mapping]] = ..., waiting: _Optional[_Union[WaitingForTraffic, _Mapping]] = ...) -> None: ...

class WaitingForTraffic(_message.Message):
    __slots__ = ("num_steps",)
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    def __init__(self, num_steps: _Optional[int] = ...) -> None: ...

class DevicePeak(_message.Message):
    __slots__ = ("name", "value", "unit", "source", "citation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CITATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    unit: str
    source: FigureSource
    citation: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., unit: _Optional[str] = ..., source: _Optional[_Union[FigureSource, str]] = ..., citation: _Optional[str] = ...) -> None: ...

class ProfiledDevice(_message.Message):
    __slots__ = ("backend", "name", "num_threads", "time_source", "peaks", "peaks_of")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    TIME_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PEAKS_FIELD_NUMBER: _ClassVar[int]
    PEAKS_OF_FIELD_NUMBER: _ClassVar[int]
    backend: str
    name: str
    num_threads: int
    time_source: TimeSource
    peaks: _containers.RepeatedCompositeFieldContainer[DevicePeak]
    peaks_of: str
    def __init__(self, backend: _Optional[str] = ..., name: _Optional[str] = ..., num_threads: _Optional[int] = ..., time_source: _Optional[_Union[TimeSource, str]] = ..., peaks: _Optional[_Iterable[_Union[DevicePeak, _Mapping]]] = ..., peaks_of: _Optional[str] = ...) -> None: ...

class NamedBytes(_message.Message):
    __slots__ = ("name", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ProfiledModel(_message.Message):
    __slots__ = ("name", "architecture", "num_parameters", "weight_bytes", "weight_formats", "activation_dtype", "kv_cache_dtype", "kv_bytes_per_token", "weight_bytes_per_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMATS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    weight_formats: _containers.RepeatedScalarFieldContainer[str]
    activation_dtype: str
    kv_cache_dtype: str
    kv_bytes_per_token: int
    weight_bytes_per_token: _containers.RepeatedCompositeFieldContainer[NamedBytes]
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., num_parameters: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., weight_formats: _Optional[_Iterable[str]] = ..., activation_dtype: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., weight_bytes_per_token: _Optional[_Iterable[_Union[NamedBytes, _Mapping]]] = ...) -> None: ...

class OpProfile(_message.Message):
    __slots__ = ("name", "num_calls", "time_s", "weight_bytes", "kv_bytes", "activation_bytes", "flops", "gbps", "kv_written_bytes", "activation_written_bytes", "intensity", "share_of_attainable", "bound", "num_launches", "counted")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_CALLS_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    GBPS_FIELD_NUMBER: _ClassVar[int]
    KV_WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    INTENSITY_FIELD_NUMBER: _ClassVar[int]
    SHARE_OF_ATTAINABLE_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    NUM_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_calls: int
    time_s: float
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    flops: int
    gbps: float
    kv_written_bytes: int
    activation_written_bytes: int
    intensity: float
    share_of_attainable: float
    bound: Bound
    num_launches: int
    counted: CountedTraffic
    def __init__(self, name: _Optional[str] = ..., num_calls: _Optional[int] = ..., time_s: _Optional[float] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., activation_bytes: _Optional[int] = ..., flops: _Optional[int] = ..., gbps: _Optional[float] = ..., kv_written_bytes: _Optional[int] = ..., activation_written_bytes: _Optional[int] = ..., intensity: _Optional[float] = ..., share_of_attainable: _Optional[float] = ..., bound: _Optional[_Union[Bound, str]] = ..., num_launches: _Optional[int] = ..., counted: _Optional[_Union[CountedTraffic, _Mapping]] = ...) -> None: ...

class CountedTraffic(_message.Message):
    __slots__ = ("dram", "l2", "lanes", "shared_bytes", "shared_wavefronts", "shared_wavefronts_ideal", "warp_instructions", "lane_instructions")
    DRAM_FIELD_NUMBER: _ClassVar[int]
    L2_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_WAVEFRONTS_FIELD_NUMBER: _ClassVar[int]
    SHARED_WAVEFRONTS_IDEAL_FIELD_NUMBER: _ClassVar[int]
    WARP_INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    LANE_INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    dram: BytesByKind
    l2: BytesByKind
    lanes: BytesByKind
    shared_bytes: int
    shared_wavefronts: int
    shared_wavefronts_ideal: int
    warp_instructions: int
    lane_instructions: int
    def __init__(self, dram: _Optional[_Union[BytesByKind, _Mapping]] = ..., l2: _Optional[_Union[BytesByKind, _Mapping]] = ..., lanes: _Optional[_Union[BytesByKind, _Mapping]] = ..., shared_bytes: _Optional[int] = ..., shared_wavefronts: _Optional[int] = ..., shared_wavefronts_ideal: _Optional[int] = ..., warp_instructions: _Optional[int] = ..., lane_instructions: _Optional[int] = ...) -> None: ...

class BytesByKind(_message.Message):
    __slots__ = ("weights", "kv", "activations", "scratch")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_FIELD_NUMBER: _ClassVar[int]
    weights: int
    kv: int
    activations: int
    scratch: int
    def __init__(self, weights: _Optional[int] = ..., kv: _Optional[int] = ..., activations: _Optional[int] = ..., scratch: _Optional[int] = ...) -> None: ...

class OpCall(_message.Message):
    __slots__ = ("name", "layer", "start_s", "time_s", "num_launches", "num_bytes", "flops")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    layer: int
    start_s: float
    time_s: float
    num_launches: int
    num_bytes: int
    flops: int
    def __init__(self, name: _Optional[str] = ..., layer: _Optional[int] = ..., start_s: _Optional[float] = ..., time_s: _Optional[float] = ..., num_launches: _Optional[int] = ..., num_bytes: _Optional[int] = ..., flops: _Optional[int] = ...) -> None: ...

class StepProfile(_message.Message):
    __slots__ = ("index", "num_prefill_tokens", "num_decode_tokens", "num_seqs", "time_s", "ops", "text", "overhead_s", "calls", "calls_left_out", "unprofiled", "launch_gap_s", "arithmetic_idle_share")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_S_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CALLS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    UNPROFILED_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_GAP_S_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_IDLE_SHARE_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_seqs: int
    time_s: float
    ops: _containers.RepeatedCompositeFieldContainer[OpProfile]
    text: str
    overhead_s: float
    calls: _containers.RepeatedCompositeFieldContainer[OpCall]
    calls_left_out: int
    unprofiled: bool
    launch_gap_s: float
    arithmetic_idle_share: float
    def __init__(self, index: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., num_seqs: _Optional[int] = ..., time_s: _Optional[float] = ..., ops: _Optional[_Iterable[_Union[OpProfile, _Mapping]]] = ..., text: _Optional[str] = ..., overhead_s: _Optional[float] = ..., calls: _Optional[_Iterable[_Union[OpCall, _Mapping]]] = ..., calls_left_out: _Optional[int] = ..., unprofiled: bool = ..., launch_gap_s: _Optional[float] = ..., arithmetic_idle_share: _Optional[float] = ...) -> None: ...

class OpShare(_message.Message):
    __slots__ = ("name", "share")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    share: float
    def __init__(self, name: _Optional[str] = ..., share: _Optional[float] = ...) -> None: ...

class MemoryUse(_message.Message):
    __slots__ = ("weight_bytes", "kv_cache_bytes", "kv_used_bytes", "free_bytes", "process_bytes")
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_BYTES_FIELD_NUMBER: _ClassVar[int]
    weight_bytes: int
    kv_cache_bytes: int
    kv_used_bytes: int
    free_bytes: int
    process_bytes: int
    def __init__(self, weight_bytes: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., kv_used_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., process_bytes: _Optional[int] = ...) -> None: ...

class ProfileSummary(_message.Message):
    __slots__ = ("num_prefill_steps", "num_decode_steps", "prefill_tokens_per_s", "decode_tokens_per_s", "read_bandwidth_gbps", "bytes_per_token", "floor_s", "share_of_floor", "ops", "shares", "finish_reason", "usage", "weight_bytes_per_token", "kv_bytes_per_token", "overhead_s_per_step", "decode_tokens_per_s_p10", "decode_tokens_per_s_p90", "prefill_tokens_per_s_p10", "prefill_tokens_per_s_p90", "prefill_ops", "prefill_shares", "decode_arithmetic_idle_share", "prefill_arithmetic_idle_share", "launches_per_step", "launch_gap_s_per_step", "host_s_per_step", "num_unprofiled_steps", "unprofiled_step_s", "profiled_step_s", "profiled_ops_s", "memory", "decode_seqs")
    NUM_PREFILL_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    READ_BANDWIDTH_GBPS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FLOOR_S_FIELD_NUMBER: _ClassVar[int]
    SHARE_OF_FLOOR_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_S_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_P10_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_P90_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_P10_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_P90_FIELD_NUMBER: _ClassVar[int]
    PREFILL_OPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SHARES_FIELD_NUMBER: _ClassVar[int]
    DECODE_ARITHMETIC_IDLE_SHARE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ARITHMETIC_IDLE_SHARE_FIELD_NUMBER: _ClassVar[int]
    LAUNCHES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_GAP_S_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    HOST_S_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_UNPROFILED_STEPS_FIELD_NUMBER: _ClassVar[int]
    UNPROFILED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PROFILED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PROFILED_OPS_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQS_FIELD_NUMBER: _ClassVar[int]
    num_prefill_steps: int
    num_decode_steps: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    read_bandwidth_gbps: float
    bytes_per_token: int
    floor_s: float
    share_of_floor: float
    ops: _containers.RepeatedCompositeFieldContainer[OpProfile]
    shares: _containers.RepeatedCompositeFieldContainer[OpShare]
    finish_reason: FinishReason
    usage: Usage
    weight_bytes_per_token: int
    kv_bytes_per_token: int
    overhead_s_per_step: float
    decode_tokens_per_s_p10: float
    decode_tokens_per_s_p90: float
    prefill_tokens_per_s_p10: float
    prefill_tokens_per_s_p90: float
    prefill_ops: _containers.RepeatedCompositeFieldContainer[OpProfile]
    prefill_shares: _containers.RepeatedCompositeFieldContainer[OpShare]
    decode_arithmetic_idle_share: float
    prefill_arithmetic_idle_share: float
    launches_per_step: float
    launch_gap_s_per_step: float
    host_s_per_step: float
    num_unprofiled_steps: int
    unprofiled_step_s: float
    profiled_step_s: float
    profiled_ops_s: float
    memory: MemoryUse
    decode_seqs: int
    def __init__(self, num_prefill_steps: _Optional[int] = ..., num_decode_steps: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., read_bandwidth_gbps: _Optional[float] = ..., bytes_per_token: _Optional[int] = ..., floor_s: _Optional[float] = ..., share_of_floor: _Optional[float] = ..., ops: _Optional[_Iterable[_Union[OpProfile, _Mapping]]] = ..., shares: _Optional[_Iterable[_Union[OpShare, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., weight_bytes_per_token: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., overhead_s_per_step: _Optional[float] = ..., decode_tokens_per_s_p10: _Optional[float] = ..., decode_tokens_per_s_p90: _Optional[float] = ..., prefill_tokens_per_s_p10: _Optional[float] = ..., prefill_tokens_per_s_p90: _Optional[float] = ..., prefill_ops: _Optional[_Iterable[_Union[OpProfile, _Mapping]]] = ..., prefill_shares: _Optional[_Iterable[_Union[OpShare, _Mapping]]] = ..., decode_arithmetic_idle_share: _Optional[float] = ..., prefill_arithmetic_idle_share: _Optional[float] = ..., launches_per_step: _Optional[float] = ..., launch_gap_s_per_step: _Optional[float] = ..., host_s_per_step: _Optional[float] = ..., num_unprofiled_steps: _Optional[int] = ..., unprofiled_step_s: _Optional[float] = ..., profiled_step_s: _Optional[float] = ..., profiled_ops_s: _Optional[float] = ..., memory: _Optional[_Union[MemoryUse, _Mapping]] = ..., decode_seqs: _Optional[int] = ...) -> None: ...

class ModelSize(_message.Message):
    __slots__ = ("num_parameters", "num_layers", "hidden_size", "num_kv_heads", "head_dim")
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    num_parameters: int
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    def __init__(self, num_parameters: _Optional[int] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("acceptance", "draft_len", "draft_cost")
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COST_FIELD_NUMBER: _ClassVar[int]
    acceptance: float
    draft_len: int
    draft_cost: float
    def __init__(self, acceptance: _Optional[float] = ..., draft_len: _Optional[int] = ..., draft_cost: _Optional[float] = ...) -> None: ...

class EstimateThroughputRequest(_message.Message):
    __slots__ = ("config_json", "size", "gpus", "weight_format", "kv_format", "batch", "context", "tensor_parallel", "speculation", "target_tokens_per_s")
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    config_json: str
    size: ModelSize
    gpus: _containers.RepeatedScalarFieldContainer[str]
    weight_format: str
    kv_format: str
    batch: int
    context: int
    tensor_parallel: int
    speculation: Speculation
    target_tokens_per_s: float
    def __init__(self, config_json: _Optional[str] = ..., size: _Optional[_Union[ModelSize, _Mapping]] = ..., gpus: _Optional[_Iterable[str]] = ..., weight_format: _Optional[str] = ..., kv_format: _Optional[str] = ..., batch: _Optional[int] = ..., context: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., target_tokens_per_s: _Optional[float] = ...) -> None: ...

class EstimateThroughputResponse(_message.Message):
    __slots__ = ("estimates",)
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    estimates: _containers.RepeatedCompositeFieldContainer[ThroughputEstimate]
    def __init__(self, estimates: _Optional[_Iterable[_Union[ThroughputEstimate, _Mapping]]] = ...) -> None: ...

class ThroughputEstimate(_message.Message):
    __slots__ = ("model", "num_parameters", "weight_format", "kv_format", "batch", "context", "tensor_parallel", "gpu", "decode", "prefill", "memory", "machine_balance", "decode_intensity", "ridge_batch", "levers", "energy", "joules_per_token", "joules_per_token_at_tdp", "target", "notes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MACHINE_BALANCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_INTENSITY_FIELD_NUMBER: _ClassVar[int]
    RIDGE_BATCH_FIELD_NUMBER: _ClassVar[int]
    LEVERS_FIELD_NUMBER: _ClassVar[int]
    ENERGY_FIELD_NUMBER: _ClassVar[int]
    JOULES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    JOULES_PER_TOKEN_AT_TDP_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_parameters: int
    weight_format: str
    kv_format: str
    batch: int
    context: int
    tensor_parallel: int
    gpu: PlannedGpu
    decode: PhaseEstimate
    prefill: PhaseEstimate
    memory: MemoryNeed
    machine_balance: float
    decode_intensity: float
    ridge_batch: int
    levers: _containers.RepeatedCompositeFieldContainer[Lever]
    energy: _containers.RepeatedCompositeFieldContainer[EnergyLevel]
    joules_per_token: float
    joules_per_token_at_tdp: float
    target: ThroughputTarget
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., num_parameters: _Optional[int] = ..., weight_format: _Optional[str] = ..., kv_format: _Optional[str] = ..., batch: _Optional[int] = ..., context: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., gpu: _Optional[_Union[PlannedGpu, _Mapping]] = ..., decode: _Optional[_Union[PhaseEstimate, _Mapping]] = ..., prefill: _Optional[_Union[PhaseEstimate, _Mapping]] = ..., memory: _Optional[_Union[MemoryNeed, _Mapping]] = ..., machine_balance: _Optional[float] = ..., decode_intensity: _Optional[float] = ..., ridge_batch: _Optional[int] = ..., levers: _Optional[_Iterable[_Union[Lever, _Mapping]]] = ..., energy: _Optional[_Iterable[_Union[EnergyLevel, _Mapping]]] = ..., joules_per_token: _Optional[float] = ..., joules_per_token_at_tdp: _Optional[float] = ..., target: _Optional[_Union[ThroughputTarget, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class PlannedGpu(_message.Message):
    __slots__ = ("key", "name", "memory_bytes", "memory_kind", "peaks", "l2_bytes", "tdp_w")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    PEAKS_FIELD_NUMBER: _ClassVar[int]
    L2_BYTES_FIELD_NUMBER: _ClassVar[int]
    TDP_W_FIELD_NUMBER: _ClassVar[int]
    key: str
    name: str
    memory_bytes: int
    memory_kind: str
    peaks: _containers.RepeatedCompositeFieldContainer[DevicePeak]
    l2_bytes: int
    tdp_w: float
    def __init__(self, key: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., memory_kind: _Optional[str] = ..., peaks: _Optional[_Iterable[_Union[DevicePeak, _Mapping]]] = ..., l2_bytes: _Optional[int] = ..., tdp_w: _Optional[float] = ...) -> None: ...

class PhaseEstimate(_message.Message):
    __slots__ = ("time_per_token_s", "tokens_per_s", "pass_s", "bound", "memory_s", "compute_s", "link_s", "weight_bytes", "kv_bytes", "flops", "share_of_tensor_peak", "share_of_shader_fp16_peak")
    TIME_PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    MEMORY_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    LINK_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    SHARE_OF_TENSOR_PEAK_FIELD_NUMBER: _ClassVar[int]
    SHARE_OF_SHADER_FP16_PEAK_FIELD_NUMBER: _ClassVar[int]
    time_per_token_s: float
    tokens_per_s: float
    pass_s: float
    bound: Bound
    memory_s: float
    compute_s: float
    link_s: float
    weight_bytes: float
    kv_bytes: float
    flops: float
    share_of_tensor_peak: float
    share_of_shader_fp16_peak: float
    def __init__(self, time_per_token_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., pass_s: _Optional[float] = ..., bound: _Optional[_Union[Bound, str]] = ..., memory_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., link_s: _Optional[float] = ..., weight_bytes: _Optional[float] = ..., kv_bytes: _Optional[float] = ..., flops: _Optional[float] = ..., share_of_tensor_peak: _Optional[float] = ..., share_of_shader_fp16_peak: _Optional[float] = ...) -> None: ...

class MemoryNeed(_message.Message):
    __slots__ = ("weight_bytes", "kv_bytes", "kv_bytes_per_token", "total_bytes", "available_bytes", "fits", "max_sequences", "max_context")
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    weight_bytes: float
    kv_bytes: float
    kv_bytes_per_token: float
    total_bytes: float
    available_bytes: int
    fits: bool
    max_sequences: int
    max_context: int
    def __init__(self, weight_bytes: _Optional[float] = ..., kv_bytes: _Optional[float] = ..., kv_bytes_per_token: _Optional[float] = ..., total_bytes: _Optional[float] = ..., available_bytes: _Optional[int] = ..., fits: bool = ..., max_sequences: _Optional[int] = ..., max_context: _Optional[int] = ...) -> None: ...

class Lever(_message.Message):
    __slots__ = ("name", "change", "metric", "tokens_per_s", "factor", "bound", "memory_bytes", "fits", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    change: str
    metric: str
    tokens_per_s: float
    factor: float
    bound: Bound
    memory_bytes: float
    fits: bool
    source: str
    def __init__(self, name: _Optional[str] = ..., change: _Optional[str] = ..., metric: _Optional[str] = ..., tokens_per_s: _Optional[float] = ..., factor: _Optional[float] = ..., bound: _Optional[_Union[Bound, str]] = ..., memory_bytes: _Optional[float] = ..., fits: bool = ..., source: _Optional[str] = ...) -> None: ...

class EnergyLevel(_message.Message):
    __slots__ = ("level", "count", "unit", "picojoules", "joules", "source", "detail")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    PICOJOULES_FIELD_NUMBER: _ClassVar[int]
    JOULES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    level: str
    count: float
    unit: str
    picojoules: float
    joules: float
    source: str
    detail: str
    def __init__(self, level: _Optional[str] = ..., count: _Optional[float] = ..., unit: _Optional[str] = ..., picojoules: _Optional[float] = ..., joules: _Optional[float] = ..., source: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class ThroughputTarget(_message.Message):
    __slots__ = ("tokens_per_s", "bandwidth_gbps", "num_gpus")
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_GBPS_FIELD_NUMBER: _ClassVar[int]
    NUM_GPUS_FIELD_NUMBER: _ClassVar[int]
    tokens_per_s: float
    bandwidth_gbps: float
    num_gpus: int
    def __init__(self, tokens_per_s: _Optional[float] = ..., bandwidth_gbps: _Optional[float] = ..., num_gpus: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "add_special_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    add_special_tokens: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., add_special_tokens: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("name", "architecture", "num_parameters", "weight_bytes", "weight_formats", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_model_len", "eos_token_ids", "has_chat_template", "backend", "device_name", "num_threads", "activation_dtype", "kv_cache_dtype", "kv_bytes_per_token", "default_sampling")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMATS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    INTERMEDIATE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    weight_formats: _containers.RepeatedScalarFieldContainer[str]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    backend: str
    device_name: str
    num_threads: int
    activation_dtype: str
    kv_cache_dtype: str
    kv_bytes_per_token: int
    default_sampling: SamplingParams
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., num_parameters: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., weight_formats: _Optional[_Iterable[str]] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., intermediate_size: _Optional[int] = ..., num_heads: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: bool = ..., backend: _Optional[str] = ..., device_name: _Optional[str] = ..., num_threads: _Optional[int] = ..., activation_dtype: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., default_sampling: _Optional[_Union[SamplingParams, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("state", "detail", "uptime_s", "load_done_bytes", "load_total_bytes", "engine", "counters", "profiling", "engine_heartbeat_age_s")
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PROFILING_FIELD_NUMBER: _ClassVar[int]
    ENGINE_HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    state: ServerState
    detail: str
    uptime_s: float
    load_done_bytes: int
    load_total_bytes: int
    engine: EngineStats
    counters: ServiceCounters
    profiling: bool
    engine_heartbeat_age_s: float
    def __init__(self, state: _Optional[_Union[ServerState, str]] = ..., detail: _Optional[str] = ..., uptime_s: _Optional[float] = ..., load_done_bytes: _Optional[int] = ..., load_total_bytes: _Optional[int] = ..., engine: _Optional[_Union[EngineStats, _Mapping]] = ..., counters: _Optional[_Union[ServiceCounters, _Mapping]] = ..., profiling: bool = ..., engine_heartbeat_age_s: _Optional[float] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("num_running", "num_waiting", "max_num_seqs", "num_kv_blocks", "num_free_kv_blocks", "block_size", "prompt_tokens", "cached_prompt_tokens", "completion_tokens", "num_steps", "num_preemptions", "num_finished", "num_aborted")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    block_size: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    num_steps: int
    num_preemptions: int
    num_finished: int
    num_aborted: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ..., num_free_kv_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_aborted: _Optional[int] = ...) -> None: ...

class ServiceCounters(_message.Message):
    __slots__ = ("received", "finished", "aborted", "cancelled", "deadline_exceeded", "invalid", "rejected", "unavailable", "slow_client", "failed", "in_flight")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_EXCEEDED_FIELD_NUMBER: _ClassVar[int]
    INVALID_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    SLOW_CLIENT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    received: int
    finished: int
    aborted: int
    cancelled: int
    deadline_exceeded: int
    invalid: int
    rejected: int
    unavailable: int
    slow_client: int
    failed: int
    in_flight: int
    def __init__(self, received: _Optional[int] = ..., finished: _Optional[int] = ..., aborted: _Optional[int] = ..., cancelled: _Optional[int] = ..., deadline_exceeded: _Optional[int] = ..., invalid: _Optional[int] = ..., rejected: _Optional[int] = ..., unavailable: _Optional[int] = ..., slow_client: _Optional[int] = ..., failed: _Optional[int] = ..., in_flight: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("usage",)
    USAGE_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...
