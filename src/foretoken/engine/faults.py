"""The errors that refuse or end single requests, or end all requests of a batch. No torch."""

from __future__ import annotations

import traceback

from foretoken import errors
from foretoken.engine.memory_plan import is_out_of_memory, memory_error
from foretoken.engine.request import Request

_FAILURES = ("cuda error", "cuda driver error", "triton error", "cublas_status", "cudnn_status",
             "nvrtc", "hip error", "device-side assert")  # fmt: skip


def is_device_failure(error: BaseException) -> bool:
    """Whether an error says that the GPU failed: illegal access, assertion, broken hardware.

    After most such errors every later call fails, too. The GPU reports them late, so the results of
    the step before cannot be trusted, either.
    """
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    has_type = type(error).__name__ == "AcceleratorError"  # since torch 2.8
    return has_type or any(text in str(error).lower() for text in _FAILURES)


def broken_engine(cause: BaseException) -> errors.EngineBrokenError:
    """The error of every call to an engine after its device has failed."""
    reason = str(cause).partition("\n")[0]
    return errors.EngineBrokenError(
        f"The device failed ({reason}), and nothing more can be computed in this process: start "
        "another process. If this happens again, CUDA_LAUNCH_BLOCKING=1 in the environment shows "
        "where, and `nvidia-smi -q` and the system's log say whether the hardware is at fault."
    ).caused_by(cause)


def processing_error(request: Request, cause: Exception) -> errors.ForetokenError:
    """The error of a request if `cause` was raised by the work for this request only."""
    if isinstance(cause, errors.RequestError):  # for example, a grammar is too complex
        return cause
    return errors.ProcessingError(
        f"request {request.group.request_id}, sample {request.index}: "
        f"{type(cause).__name__} while it was processed: {cause}"
    ).caused_by(cause)


def overloaded(num_waiting: int, max_num_waiting: int | None) -> errors.OverloadedError:
    """The error of a request that a full queue refuses."""
    bound = f"more than {num_waiting}, the number of requests that wait already"
    remedy = "Send the request again later, or raise `max_num_waiting`."
    return errors.OverloadedError("max_num_waiting", max_num_waiting, bound, remedy)


def step_failure(cause: BaseException) -> errors.ForetokenError:
    """The error of all requests of a batch if `cause` was raised by the work for the whole batch.

    Outputs keep this error and its traceback. The frames are cleared, so that tensors are freed.
    """
    traceback.clear_frames(cause.__traceback__)
    if is_out_of_memory(cause):
        return memory_error("a step was computed", cause)
    if is_device_failure(cause):
        return broken_engine(cause)
    name = type(cause).__name__
    return errors.StepError(f"{name} in a step of the whole batch: {cause}").caused_by(cause)


def no_token(request: Request, bans_all: bool) -> errors.ForetokenError:
    """The error of a request for which no token can be drawn.

    Args:
        bans_all: True: the request's parameters ban every token. False: the target's logits are not
            finite.
    """
    position, params = len(request.token_ids), request.params
    if bans_all:
        is_used = {
            "structured_outputs": params.grammar is not None,
            "allowed_token_ids": params.allowed_token_ids is not None,
            "bad_words": params.bad_words,
            "min_tokens": request.num_output < params.min_tokens,
        }
        names = [name for name, used in is_used.items() if used]
        value = getattr(params, names[0]) if len(names) == 1 else "together they ban every token"
        bound = f"such that some token is allowed at position {position}"
        return errors.RequestError(", ".join(names), value, bound)
    return errors.NonFiniteLogitsError(
        f"request {request.group.request_id}: the target's logits are not finite at position "
        f"{position}. Try dtype float32, or check the checkpoint."
    )
