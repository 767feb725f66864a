"""Everything this package attaches to or relies on inside SGLang, in one table, checked before anything is attached."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import sys
from dataclasses import dataclass
from typing import Any

SGLANG_VERSION = "0.5.23"
_SRT = "sglang.srt"


@dataclass(frozen=True, slots=True)
class Pin:
    """A function or class of SGLang that we call, override or hook, and the parameter names we expect of it.

    ``hook`` is one of before / after / around / replace, or empty for what is only called or overridden.
    ``implementation`` is ``module:attribute`` of ours. ``parameters`` None means that only its existence matters.
    """

    target: str
    parameters: tuple[str, ...] | None
    why: str
    hook: str = ""
    implementation: str = ""


_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
_RUNNER = f"{_SRT}.model_executor"
_TOKENIZER_MANAGER = f"{_SRT}.managers.tokenizer_manager.TokenizerManager"

PINS: tuple[Pin, ...] = (
    # hooks
    Pin(
        f"{_SRT}.server_args.ServerArgs",
        None,
        "carries our launch flags to every process; resolves short model names; refuses what cannot work",
        "replace",
        "sglang_acache.srt.flags:AcacheServerArgs",
    ),
    Pin(
        _SCHEDULER,
        ("server_args", "port_args"),
        "steps diffusion requests; defers to SGLang for any other model",
        "replace",
        "sglang_acache.srt.scheduler:DiffusionScheduler",
    ),
    Pin(
        f"{_TOKENIZER_MANAGER}._validate_one_request",
        ("self", "obj", "input_ids"),
        "request defaults and refusals with status 400",
        "before",
        "sglang_acache.srt.api_hooks:validate_one_request",
    ),
    Pin(
        f"{_SRT}.entrypoints.openai.serving_completions.OpenAIServingCompletion._build_sampling_params",
        ("self", "request"),
        "suffix (infilling) and completion defaults",
        "after",
        "sglang_acache.srt.api_hooks:build_completion_sampling_params",
    ),
    Pin(
        f"{_SRT}.configs.model_config.ModelConfig.get_default_sampling_params",
        ("self",),
        "greedy chat requests where the client gives no temperature",
        "after",
        "sglang_acache.srt.api_hooks:default_sampling_params",
    ),
    Pin(
        f"{_SRT}.entrypoints.http_server._setup_and_run_http_server",
        (
            "server_args",
            "tokenizer_manager",
            "template_manager",
            "port_args",
            "scheduler_infos",
            "subprocess_watchdog",
            "execute_warmup_func",
            "launch_callback",
        ),
        "the route /acache/spans",
        "before",
        "sglang_acache.srt.spans_routes:install",
    ),
    Pin(
        f"{_SRT}.entrypoints.api_contract.generate_contract_error",
        ("body",),
        "names the field in SGLang's own 400 for a wrong type",
        "after",
        "sglang_acache.srt.api_hooks:name_contract_field",
    ),
    # registries
    Pin(f"{_SRT}.layers.attention.attention_registry.register_attention_backend", ("name",), "acache_* backends"),
    Pin(f"{_SRT}.server_args.add_attention_backend_choices", ("iterable",), "--attention-backend acache_*"),
    Pin(f"{_SRT}.mem_cache.registry.register_radix_cache_backend", ("name", "factory"), "owner of a request's slots"),
    Pin(f"{_SRT}.arg_groups.overrides.register_model_override", ("architecture",), "defaults of our architectures"),
    Pin(f"{_SRT}.arg_groups.resolution_hooks.register_resolution_hook", ("name",), "slots, graphs, chunking"),
    Pin(f"{_SRT}.managers.io_struct.hook_custom_types", ("new_types",), "messages of /acache/spans"),
    Pin("sglang.utils.TypeBasedDispatcher", ("mapping",), "messages of /acache/spans, on both sides"),
    # overridden
    Pin(f"{_SCHEDULER}.get_next_batch_to_run", ("self", "running_batch", "last_batch"), "overridden: one step"),
    Pin(f"{_SCHEDULER}.process_batch_result_dllm", ("self", "batch", "result"), "overridden: commit and stream"),
    Pin(f"{_SCHEDULER}.validate_dllm_request", ("self", "req"), "overridden: attach the diffusion part"),
    Pin(f"{_SCHEDULER}.init_req_max_new_tokens", ("self", "req"), "overridden: no clipping of a canvas"),
    Pin(f"{_SCHEDULER}.pause_generation", ("self", "recv_req"), "overridden: live requests are listed once"),
    Pin(f"{_SCHEDULER}.get_output_streamer_class", ("self",), "overridden: meta_info.diffusion"),
    Pin(
        f"{_SRT}.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
        ".build_additional_customized_info",
        ("self", "reqs"),
        "overridden: meta_info.diffusion",
    ),
    Pin(
        f"{_SRT}.mem_cache.base_prefix_cache.BasePrefixCache.free_kv_row",
        ("self", "kv", "ranges"),
        "overridden: free private slots only",
    ),
    # called
    Pin(
        f"{_SRT}.managers.schedule_batch.ScheduleBatch.init_new",
        (
            "reqs",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "tree_cache",
            "model_config",
            "enable_overlap",
            "spec_algorithm",
            "chunked_req",
            "dllm_config",
        ),
        "the batch of a step",
    ),
    Pin(f"{_SRT}.managers.schedule_batch.Req.update_finish_state", ("self", "new_accepted_len"), "stop conditions"),
    Pin(
        f"{_SRT}.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
        ("self", "can_run_cuda_graph", "running_batch", "num_generated_tokens"),
        "the periodic log line",
    ),
    Pin(f"{_SRT}.mem_cache.common.release_kv_cache", ("req", "tree_cache", "checkpoint"), "release of a row"),
    Pin(f"{_SRT}.mem_cache.memory_pool.ReqToTokenPool.alloc", ("self", "reqs"), "a row a request"),
    Pin(f"{_SRT}.mem_cache.memory_pool.ReqToTokenPool.write", ("self", "indices", "values"), "the read-slot map"),
    Pin(f"{_SRT}.mem_cache.allocator.token.TokenToKVPoolAllocator.alloc", ("self", "need_size"), "slots"),
    Pin(f"{_SRT}.model_executor.model_runner.ModelRunner.forward", None, "the forward of a step"),
    Pin(
        f"{_SRT}.layers.layernorm.RMSNorm.forward_native",
        ("self", "x", "residual", "post_residual_addition", "quant_linear"),
        "our norm on a CPU",
    ),
    Pin(f"{_SRT}.layers.activation.SiluAndMul.forward_native", ("self", "x"), "our activation on a CPU"),
    Pin(
        f"{_SRT}.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        ("self", "layer", "x", "bias"),
        "packed linear layers on a CPU",
    ),
    # called on CUDA only
    Pin(
        f"{_RUNNER}.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
        ("self", "forward_batch"),
        "our graphs take its seat",
    ),
    Pin(
        f"{_RUNNER}.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute",
        ("self", "forward_batch", "pp_proxy_tensors"),
        "our graphs take its seat",
    ),
    Pin(f"{_RUNNER}.forward_context.forward_context", ("ctx", "forward_batch"), "the backend of a captured forward"),
    Pin(f"{_RUNNER}.runner_utils.capture_mode.model_capture_mode", (), "layers see that they are captured"),
    Pin(f"{_RUNNER}.runner_utils.pool.get_or_create_global_graph_memory_pool", ("device_module",), "memory of graphs"),
    Pin(f"{_RUNNER}.runner_utils.pool.get_or_create_global_graph_capture_stream", (), "stream of captures"),
    Pin(f"{_RUNNER}.runner_utils.pool.graph_pool_capture_scope", (), "memory of graphs"),
    Pin(f"{_RUNNER}.runner_utils.pool.graph_pool_replay_scope", (), "memory of graphs"),
    Pin(f"{_RUNNER}.model_runner.ModelRunner.init_decode_cuda_graph", ("self",), "captures again after weight updates"),
    Pin(
        f"{_RUNNER}.runner.base_cuda_graph_runner.freeze_gc",
        ("enable_cudagraph_gc",),
        "no garbage collection in captures",
    ),
    Pin(f"{_SRT}.distributed.parallel_state.graph_capture", ("stream",), "collectives in captures"),
    Pin(
        f"{_SRT}.distributed.device_communicators.pynccl_allocator.set_graph_pool_id",
        ("graph_pool_id",),
        "collectives in captures",
    ),
    Pin(f"{_SRT}.managers.communicator.FanOutCommunicator", ("send", "fan_out", "mode"), "asks the schedulers"),
    Pin(f"{_TOKENIZER_MANAGER}._dispatch_to_scheduler", ("self", "obj"), "asks the schedulers"),
    Pin(f"{_TOKENIZER_MANAGER}.auto_create_handle_loop", ("self",), "receives their replies"),
    Pin(f"{_SRT}.utils.auth.auth_level", ("level",), "/acache/spans needs the key that /flush_cache needs"),
    Pin(f"{_SRT}.observability.metrics_collector.SchedulerMetricsCollector", None, "labels of our metrics"),
    Pin(f"{_SRT}.entrypoints.engine.Engine.server_args_class", None, "sglang.Engine takes our flags"),
    Pin(f"{_SRT}.runtime_context.get_context", (), "our flags in the scheduler and the tokenizer manager"),
)


def mismatches(pins: tuple[Pin, ...] = PINS) -> list[str]:
    """One line for every way in which the installed SGLang is not what this package was written for."""
    version = importlib.metadata.version("sglang")
    problems = []
    if version != SGLANG_VERSION:
        problems.append(f"sglang is {version}, this package is written for {SGLANG_VERSION}")
    for pin in pins:
        problem = check_pin(pin)
        if problem:
            problems.append(problem)
    return problems


def check_pin(pin: Pin) -> str | None:
    """None where SGLang has what ``pin`` expects, else what differs."""
    try:
        target = pkgutil.resolve_name(pin.target)
    except (ImportError, AttributeError) as error:
        return f"{pin.target} is missing ({error}); needed for: {pin.why}"
    if pin.parameters is None:
        return None
    found = parameter_names(target)
    if found != pin.parameters:
        return f"{pin.target} takes {found}, expected {pin.parameters}; needed for: {pin.why}"
    return None


def parameter_names(target: Any) -> tuple[str, ...]:
    """Parameter names of a function, or of a class's constructor without self."""
    return tuple(inspect.signature(inspect.unwrap(target) if not isinstance(target, type) else target).parameters)


def mismatch_report(problems: list[str]) -> str:
    lines = ["error: sglang-acache does not match the installed SGLang:", *(f"  - {line}" for line in problems)]
    lines.append(f"fix: pip install 'sglang=={SGLANG_VERSION}', or pip uninstall sglang-acache")
    return "\n".join(lines)


def register() -> None:
    """Put every hook of the table into SGLang's hook registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for pin in PINS:
        if pin.hook:
            implementation = pkgutil.resolve_name(pin.implementation)
            HookRegistry.register(pin.target, implementation, HookType(pin.hook))
    _rebind_engine()


def _rebind_engine() -> None:
    """``sglang.Engine`` loads plugins when it is made, but bound ``ServerArgs`` when its class was: bind it again."""
    engine = sys.modules.get(f"{_SRT}.entrypoints.engine")
    if engine is not None:
        from sglang_acache.srt.flags import AcacheServerArgs

        engine.Engine.server_args_class = AcacheServerArgs
