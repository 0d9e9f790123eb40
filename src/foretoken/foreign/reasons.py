"""What several tables say of a name."""

from __future__ import annotations

from foretoken.foreign.table import Foreign

OFF = (False,)
ONE_PROCESS = Foreign((1,), "This version computes in one process.")
NO_MEDIA = Foreign(({},), "This version takes text alone.")
STRUCTURED = Foreign((), "Write `SamplingParams(structured_outputs={'json': schema})`.")
NO_LORA = Foreign((False,), "Merge the adapter into the checkpoint's weights.")
BEAM = "Beam search is not there: draw `n` samples with logprobs=0 and rank by cumulative_logprob."
WHOLE_TEXT = (
    "Every output holds the whole text so far: print what is new in it, or have `AsyncEngine` "
    "yield what is new by deltas=True."
)
IDS = "Ask for `logprobs` of the likeliest tokens."
SPECULATION = Foreign((), "Put it into `speculative_config`.")
NO_GRAPHS = Foreign((8192,), "Leave it out: decode steps are captured at any length.")
EITHER = Foreign((True, False), "Leave it out.")
OWN_CONFIG = "Edit config.json in a copy of the checkpoint."
NO_PLUGIN = "No plugin reads it here."
REPETITION = "Use `frequency_penalty` or `repetition_penalty`."
GENERATES = "This version generates text."
# What sets up a feature that is not here changes nothing, whatever it is.
ANY, ANY_FLAG = (...,), (..., True)
