"""One line of the debug log for every request that ended."""

from __future__ import annotations

import logging

from sglang_acache.core.reuse import ReuseStats
from sglang_acache.srt.live_request import LiveRequest

logger = logging.getLogger(__name__)


def log_finished(request: LiveRequest) -> None:
    """What the request cost and what reuse saved, at level debug."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", finished_line(request))


def finished_line(request: LiveRequest) -> str:
    """``rid=... canvas=...``: fields as in ``meta_info.diffusion`` and ``meta_info.acache``."""
    state = request.state
    stats = ReuseStats() if request.reuse is None else request.reuse.stats
    reason = request.req.finished_reason
    return (
        f"finished rid={request.req.rid} reason={'none' if reason is None else reason.to_json()['type']} "
        f"canvas={request.canvas_tokens} affix={stats.affix_tokens} anchors={stats.anchor_tokens} "
        f"recomputed={stats.recompute_tokens} saved={stats.recompute_tokens_saved} "
        f"forwarded={0 if state is None else state.forwarded_tokens} "
        f"passes={0 if state is None else state.forward_passes} probe_ms={stats.probe_ms:.1f}"
    )
