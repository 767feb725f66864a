"""What a finished request reports of its denoising, in ``meta_info.diffusion``."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer


class DiffusionOutputStreamer(SchedulerOutputStreamer):
    """SGLang's streamer with one more ``meta_info`` key a request."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
        """``{"diffusion": [[stats] or [], ...]}``, one entry a request; filled when the request is finished."""
        return {"diffusion": [[_stats(req)] if req.finished() else [] for req in reqs]}


def _stats(req: Any) -> dict[str, Any]:
    live = getattr(req, "diffusion", None)
    if live is None or live.state is None:
        return {}
    state = live.state
    return {
        "max_new_tokens": req.sampling_params.max_new_tokens,
        "block_length": state.params.block_length,
        "cache": state.params.cache,
        "canvas_tokens": len(state.canvas),
        "forward_passes": state.forward_passes,
        "recompute_tokens": state.recompute_tokens,
    }
