"""What a finished request reports in ``meta_info``: ``diffusion`` (its denoising) and ``acache`` (its reuse)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_acache.core.reuse import ReuseStats


class DiffusionOutputStreamer(SchedulerOutputStreamer):
    """SGLang's streamer with our ``meta_info`` keys."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
        """One entry a request and key: a list of one object when the request is finished, else an empty list."""
        return {
            "diffusion": [[_stats(req)] if req.finished() else [] for req in reqs],
            "acache": [[_reuse(req)] if req.finished() else [] for req in reqs],
        }


def _reuse(req: Any) -> dict[str, Any]:
    """Zeros where the request read no shared span."""
    live = getattr(req, "diffusion", None)
    if live is None or live.state is None:
        return {}
    stats = ReuseStats() if live.reuse is None else live.reuse.stats
    return {**asdict(stats), "forward_passes": live.state.forward_passes}


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
        "forwarded_tokens": state.forwarded_tokens,
    }
