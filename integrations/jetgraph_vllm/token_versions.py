"""Which weight version sampled each token, on vLLM's own outputs: ``RequestOutput.outputs[i].weight_versions``.

A batch is stamped when it is scheduled: the flip waits until no batch is in flight, so what was scheduled under a
version is computed under it, also by engines that schedule ahead.  The stamp follows the batch through the scheduler to
the request's outputs; nothing is guessed from the time at which an output arrives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class TokenVersions:
    """Hooks of one engine.  ``version()`` is the version that serves now; it may raise to forbid scheduling."""

    def __init__(self, scheduler: Any, output_processor: Any, version: Callable[[], int]) -> None:
        self._version = version
        self._batches: dict[int, int] = {}
        self._tokens: dict[str, list[int]] = {}
        """Versions of the tokens sampled so far, by the engine's own request id; unfinished requests only."""
        scheduler.schedule = self._stamp(scheduler.schedule)
        scheduler.update_from_output = self._tag(scheduler.update_from_output)
        output_processor.process_outputs = self._attach(output_processor.process_outputs, output_processor)

    def _stamp(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(schedule)
        def stamped(*args: Any, **kwargs: Any) -> Any:
            version = self._version()
            batch = schedule(*args, **kwargs)
            self._batches[id(batch)] = version
            return batch

        return stamped

    def _tag(self, update_from_output: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update_from_output)
        def tagged(batch: Any, *args: Any, **kwargs: Any) -> Any:
            version = self._batches.pop(id(batch), None)
            if version is None:  # scheduled before these hooks were there, so before any flip
                version = self._version()
            outputs = update_from_output(batch, *args, **kwargs)
            for of_client in outputs.values():
                for output in of_client.outputs:
                    self._tokens.setdefault(output.request_id, []).extend([version] * len(output.new_token_ids))
            return outputs

        return tagged

    def _attach(self, process_outputs: Callable[..., Any], processor: Any) -> Callable[..., Any]:
        @functools.wraps(process_outputs)
        def attached(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            for output in outputs:
                state = processor.request_states.get(output.request_id)
                if state is not None and not hasattr(state, "weight_versions"):
                    state.weight_versions = self._tokens.setdefault(output.request_id, [])
                    state._new_completion_output = _versioned(state)
            processed = process_outputs(outputs, *args, **kwargs)
            for request in self._tokens.keys() - processor.request_states.keys():  # finished or aborted
                del self._tokens[request]
            return processed

        return attached


def _versioned(state: Any) -> Callable[..., Any]:
    """The request's own maker of completions, which here get the versions of just the tokens that they hold."""
    make = state._new_completion_output

    @functools.wraps(make)
    def versioned(*args: Any, **kwargs: Any) -> Any:
        completion = make(*args, **kwargs)
        count, versions = len(completion.token_ids), state.weight_versions
        is_delta = state.output_kind.name == "DELTA"
        completion.weight_versions = tuple(versions[len(versions) - count :] if is_delta else versions[:count])
        return completion

    return versioned
