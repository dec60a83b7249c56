"""Counts what XLA compiles."""

from __future__ import annotations

import contextlib

import jax


@contextlib.contextmanager
def count_compilations():
    """Gives a list that grows by one for every compilation inside the block."""
    events = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
