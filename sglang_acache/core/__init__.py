"""The method, independent of any server: canvas, schedule, cache policies, anchors, spans. Never imports sglang."""
