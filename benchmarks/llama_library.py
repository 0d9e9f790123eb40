"""llama.cpp as a library in this process: its `.so` files, called through ctypes.

Here are its structures (of release v0.5.0, whose defaults are checked at load), a greedy loop of
one `llama_decode` per step, and its rule of prompt lookup. Everything that it leaves to its caller
is as its own programs have it: a pool of threads of its own per context (without one it starts
threads anew at every step), flash attention "auto", keys and values in half precision, mmap, and
weights repacked for the processor where it has such a form. `benchmarks.speed_gguf` calls it.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_bool, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Ids = list[int]
F16 = 1  # ggml's number of the type
DEBUG = 1  # of its log's levels


class ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(ctypes.Structure):
    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", POINTER(c_int8)),
    )


class PoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", c_bool * 512),
        ("n_threads", c_int32),
        ("prio", c_int32),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
# Results and arguments of what is called here; all else stays unknown to ctypes.
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_version": (c_char_p, ()),
    "llama_print_system_info": (c_char_p, ()),
    "llama_log_set": (None, (LOG, c_void_p)),
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_free": (None, (c_void_p,)),
    "llama_attach_threadpool": (None, (c_void_p, c_void_p, c_void_p)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
}
GGML_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_load_all_from_path": (None, (c_char_p,)),
    "ggml_threadpool_params_default": (PoolParams, (c_int32,)),
}


@dataclass
class Library:
    """The library, its backend loaded: the variant that it takes for the best on this processor.

    Attributes:
        log: what it said so far, line by line.
    """

    llama: Any
    pool_new: Any
    pool_free: Any
    pool_pause: Any
    pool_defaults: Any
    log: list[str] = field(default_factory=list)
    keep: Any = None  # the log's callback: the library has its address only

    @property
    def version(self) -> str:
        return self.llama.llama_version().decode()

    @property
    def variant(self) -> str:
        """The file name of the backend for the processor: "libggml-cpu-zen4.so"."""
        return chosen(self.log).name

    def said(self, *words: str) -> list[str]:
        """The lines of the log that have one of the words."""
        return [line for line in self.log if any(word in line for word in words)]


def load(folder: Path) -> Library:
    """Load llama.cpp from the folder of its shared libraries.

    Raises:
        RuntimeError: it is not there, or is a release whose structures are others.
    """
    names = ("libggml", "libllama")
    files = [next(iter(sorted(folder.glob(f"{name}.*so"))), None) for name in names]
    base = folder / "libggml-base.so"
    if None in files or not base.exists():
        raise RuntimeError(f"no llama.cpp libraries in {folder}")
    libraries = [ctypes.CDLL(str(path)) for path in (base, *files)]
    for signatures in (SIGNATURES, GGML_SIGNATURES):
        for name, (result, arguments) in signatures.items():
            owner = next(one for one in libraries if hasattr(one, name))
            function = getattr(owner, name)
            function.restype, function.argtypes = result, arguments
    base_library, ggml, llama = libraries
    check(llama)
    log: list[str] = []
    keep = collect(llama, log)
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    llama.llama_backend_init()
    backend = ctypes.CDLL(str(chosen(log)))  # which the library has loaded already
    pools = [getattr(backend, f"ggml_threadpool_{what}") for what in ("new", "free", "pause")]
    new, free, pause = pools
    new.restype, new.argtypes = c_void_p, (POINTER(PoolParams),)
    free.restype, free.argtypes = pause.restype, pause.argtypes = None, (c_void_p,)
    defaults = base_library.ggml_threadpool_params_default
    return Library(llama, new, free, pause, defaults, log, keep)


def chosen(log: list[str]) -> Path:
    """The file of the backend for the processor, as the log has it; `RuntimeError` if none."""
    found = re.search(r"loaded CPU backend from (.+)$", "\n".join(log), re.MULTILINE)
    if not found:
        raise RuntimeError("llama.cpp found no backend for this processor")
    return Path(found[1])


def check(llama: Any) -> None:
    """Raise `RuntimeError` where the defaults are not at the places that the structures say."""
    model, context = llama.llama_model_default_params(), llama.llama_context_default_params()
    found = (
        *(model.n_gpu_layers, model.load_mode, model.use_extra_bufts, model.no_alloc),
        *(context.n_ctx, context.n_batch, context.flash_attn_type, context.yarn_beta_slow),
        *(context.type_k, context.type_v, context.offload_kqv, context.embeddings),
        *(context.samplers, context.ctx_other),
    )
    known = (-1, -1, True, False, 512, 2048, -1, -1.0, F16, F16, True, False, None, None)
    if found != known:
        raise RuntimeError(f"another release of llama.cpp: defaults {found} in place of {known}")


def collect(llama: Any, log: list[str]) -> Any:
    """Have the library's messages in `log`; the callback, to be kept as long as the library."""
    rest = ""

    def hear(level: int, text: bytes, data: Any) -> None:
        nonlocal rest
        if level == DEBUG:
            return
        *lines, rest = (rest + text.decode("utf-8", "replace")).split("\n")
        log.extend(lines)

    callback = LOG(hear)
    llama.llama_log_set(callback, None)
    return callback


@dataclass
class Model:
    """A model and one context for one sequence."""

    library: Library
    model: int
    context: int
    vocabulary: int
    memory: int
    pool: int

    def rest(self) -> None:
        """Put the pool's threads to sleep: for some 100 ms they would spin while others work."""
        self.library.pool_pause(self.pool)

    def forget(self, length: int = 0) -> None:
        """Keep the first `length` positions only."""
        llama = self.library.llama
        if not length:
            llama.llama_memory_clear(self.memory, False)
        elif not llama.llama_memory_seq_rm(self.memory, 0, length, -1):
            raise RuntimeError("llama.cpp cannot forget positions of this model")

    def step(self, tokens: Ids, outputs: int = 1) -> Ids:
        """The likeliest token after each of the last `outputs` of the next positions.

        Raises:
            RuntimeError: the library refused.
        """
        llama, count = self.library.llama, len(tokens)
        marks = (c_int8 * count)(*[i >= count - outputs for i in range(count)])
        batch = Batch(n_tokens=count, token=(c_int32 * count)(*tokens), logits=marks)
        status = llama.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}: {self.library.log[-3:]}")
        found = []
        for i in range(count - outputs, count):
            logits = llama.llama_get_logits_ith(self.context, i)
            logits_V = np.ctypeslib.as_array(logits, shape=(self.vocabulary,))
            found.append(int(logits_V.argmax()))
        return found


@contextmanager
def opened(library: Library, path: Path, threads: int, length: int = 2048) -> Iterator[Model]:
    """A model with a context of `length` positions; both end with the block.

    Raises:
        RuntimeError: the library refused.
    """
    llama = library.llama
    asked = llama.llama_model_default_params()
    asked.n_gpu_layers, asked.use_extra_bufts = 0, True
    model = llama.llama_model_load_from_file(str(path).encode(), asked)
    if not model:
        raise RuntimeError(f"llama.cpp did not load {path.name}: {library.log[-3:]}")
    wanted = llama.llama_context_default_params()
    wanted.n_ctx, wanted.n_threads, wanted.n_threads_batch = length, threads, threads
    wanted.n_outputs_max_per_seq = 0  # as many as the batch: verification reads several
    pool, context = None, None
    try:
        context = llama.llama_init_from_model(model, wanted)
        if not context:
            raise RuntimeError(f"llama.cpp made no context: {library.log[-3:]}")
        pool = library.pool_new(byref(library.pool_defaults(threads)))
        llama.llama_attach_threadpool(context, pool, None)
        vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        memory = llama.llama_get_memory(context)
        yield Model(library, model, context, vocabulary, memory, pool)
    finally:
        if context:
            llama.llama_free(context)
        if pool:
            library.pool_free(pool)
        llama.llama_model_free(model)


@dataclass(frozen=True)
class Completion:
    """Greedy tokens, and the seconds of the prompt's pass and of all later ones."""

    tokens: Ids
    prompt_seconds: float
    decode_seconds: float
    steps: int  # passes after the prompt's

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first token."""
        return (len(self.tokens) - 1) / self.decode_seconds

    @property
    def seconds(self) -> float:
        return self.prompt_seconds + self.decode_seconds


@dataclass(frozen=True)
class Lookup:
    """llama.cpp's rule "ngram-simple": after `size` known tokens, what came next at most `k`.

    Its defaults are 12 and 48, for long texts. It drafts nothing where what followed is shorter
    than `size`, or the text is shorter than both together.
    """

    size: int
    k: int

    def draft(self, text: Ids) -> Ids:
        n = self.size
        known = len(text) - 1  # its history is without the token just sampled
        if known <= n + self.k + 1:
            return []
        pattern = text[-n:]
        for at in range(known - n - 1, 0, -1):
            if text[at : at + n] == pattern:
                found = text[at + n : min(at + n + self.k, known)]
                return found if len(found) >= n else []
        return []


def complete(
    model: Model, prompt: Ids, max_tokens: int, lookup: Lookup | None = None
) -> Completion:
    """Exactly `max_tokens` greedy tokens; the end of text is a token like others."""
    model.forget()
    start = time.perf_counter()
    text = prompt + model.step(prompt)
    end = len(prompt) + max_tokens
    first = time.perf_counter()
    steps = 0
    while len(text) < end:
        drafted = lookup.draft(text)[: end - len(text) - 1] if lookup else []
        likeliest = model.step([text[-1], *drafted], len(drafted) + 1)
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == likeliest[accepted]:
            accepted += 1
        text += likeliest[: accepted + 1]
        steps += 1
        if accepted < len(drafted):
            model.forget(len(text) - 1)
    done = time.perf_counter()
    model.rest()
    return Completion(text[len(prompt) :], first - start, done - first, steps)
