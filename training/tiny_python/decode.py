"""Batched generation with a static KV cache, for sampling a training set from the target.

One decode step is captured as a CUDA graph per cache bucket, so a step costs its kernels only. On
a CPU the same step runs eagerly. Rows share one length: no padding, no masks beyond `position`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

BUCKET = 128


def rotate(x_BHTD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves convention: (a, b) -> (a cos - b sin, b cos + a sin)."""
    a, b = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_TD + torch.cat((-b, a), dim=-1) * sin_TD


class StaticDecoder:
    """A Llama forward over a preallocated cache of `rows` rows and `length` positions."""

    def __init__(self, model: LlamaForCausalLM, rows: int, length: int) -> None:
        config = model.config
        self.model, self.rows, self.length = model, rows, length
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = model.model.layers[0].self_attn.head_dim
        self.device, self.dtype = model.device, model.dtype
        slots = -(-length // BUCKET) * BUCKET
        shape = (config.num_hidden_layers, rows, self.kv_heads, slots, self.head_dim)
        self.keys_LBKSD = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self.values_LBKSD = torch.zeros_like(self.keys_LBKSD)
        angles_SD = torch.outer(
            torch.arange(slots, device=self.device).float(), model.model.rotary_emb.inv_freq.float()
        ).repeat(1, 2)
        self.cos_SD, self.sin_SD = angles_SD.cos().to(self.dtype), angles_SD.sin().to(self.dtype)
        self.position_1 = torch.zeros(1, dtype=torch.long, device=self.device)
        self.ids_BS = torch.zeros(rows, slots + 1, dtype=torch.long, device=self.device)
        self.temperature_B = torch.zeros(rows, device=self.device)
        self._graphs: dict[int, Callable[[], None]] = {}

    def _forward(
        self, ids_BT: torch.Tensor, positions_T: torch.Tensor, bucket: int | None
    ) -> torch.Tensor:
        """Logits of the last position, [B, V]; writes this chunk's keys and values.

        `bucket` None is a prefill from position 0; otherwise one token over `bucket` slots.
        """
        x_BTE = F.embedding(ids_BT, self.model.model.embed_tokens.weight)
        rope = self.cos_SD[positions_T], self.sin_SD[positions_T]
        for index, layer in enumerate(self.model.model.layers):
            x_BTE = x_BTE + self._attend(layer, index, x_BTE, positions_T, rope, bucket)
            x_BTE = x_BTE + layer.mlp(self._norm(layer.post_attention_layernorm, x_BTE))
        last_BE = self._norm(self.model.model.norm, x_BTE[:, -1])
        return self.model.lm_head(last_BE)

    def _norm(self, norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)

    def _attend(
        self,
        layer: torch.nn.Module,
        index: int,
        x_BTE: torch.Tensor,
        positions_T: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        bucket: int | None,
    ) -> torch.Tensor:
        attention = layer.self_attn
        rows, steps, _ = x_BTE.shape
        h_BTE = self._norm(layer.input_layernorm, x_BTE)

        def split(projection: torch.nn.Module, heads: int) -> torch.Tensor:
            return projection(h_BTE).view(rows, steps, heads, self.head_dim).transpose(1, 2)

        q_BHTD = rotate(split(attention.q_proj, self.heads), *rope)
        k_BKTD = rotate(split(attention.k_proj, self.kv_heads), *rope)
        v_BKTD = split(attention.v_proj, self.kv_heads)
        self.keys_LBKSD[index].index_copy_(2, positions_T, k_BKTD)
        self.values_LBKSD[index].index_copy_(2, positions_T, v_BKTD)
        if bucket is None:
            out_BHTD = F.scaled_dot_product_attention(
                q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True
            )
        else:
            # One token: the query heads of a group become the rows of one small matrix product.
            group = self.heads // self.kv_heads
            q_BKGD = q_BHTD.reshape(rows, self.kv_heads, group, self.head_dim)
            scores_BKGS = q_BKGD @ self.keys_LBKSD[index, :, :, :bucket].transpose(-1, -2)
            hidden_S = torch.arange(bucket, device=self.device) > positions_T
            scores_BKGS = (scores_BKGS * self.head_dim**-0.5).masked_fill(hidden_S, float("-inf"))
            weights_BKGS = scores_BKGS.softmax(-1)
            out_BHTD = (weights_BKGS @ self.values_LBKSD[index, :, :, :bucket]).reshape(
                rows, self.heads, 1, self.head_dim
            )
        return attention.o_proj(out_BHTD.transpose(1, 2).reshape(rows, steps, -1))

    def _pick(self, logits_BV: torch.Tensor) -> None:
        """Sample by Gumbel-max, noise scaled by the temperature (0 is greedy); advance by one."""
        # The clamp keeps greedy rows finite: 0 · inf would be a NaN, and win the arg-max.
        exponential_BV = torch.empty_like(logits_BV, dtype=torch.float32).exponential_()
        noise_BV = -exponential_BV.clamp_min(1e-10).log()
        next_B = (logits_BV.float() + self.temperature_B[:, None] * noise_BV).argmax(-1)
        self.position_1 += 1
        self.ids_BS.index_copy_(1, self.position_1, next_B[:, None])

    def _step(self, bucket: int) -> None:
        ids_B1 = self.ids_BS.index_select(1, self.position_1)
        self._pick(self._forward(ids_B1, self.position_1, bucket))

    def _graph(self, bucket: int) -> Callable[[], None]:
        """The step over `bucket` slots, as a callable without arguments."""
        if self.device.type != "cuda":
            return lambda: self._step(bucket)
        if bucket not in self._graphs:
            position = self.position_1.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(bucket)  # warm-up: what it wrote is overwritten after the rewind
            torch.cuda.current_stream().wait_stream(stream)
            self.position_1.copy_(position)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(bucket)
            self._graphs[bucket] = graph.replay
        return self._graphs[bucket]

    @torch.no_grad()
    def generate(self, prompt_BP: torch.Tensor, temperature_B: torch.Tensor) -> torch.Tensor:
        """Continue every prompt to `length` tokens. Shape: [B, length], prompt included."""
        width = prompt_BP.shape[1]
        self.temperature_B.copy_(temperature_B)
        self.ids_BS[:, :width] = prompt_BP
        positions_P = torch.arange(width, device=self.device)
        logits_BV = self._forward(prompt_BP.to(self.device), positions_P, None)
        self.position_1.fill_(width - 1)
        self._pick(logits_BV)
        for position in range(width, self.length - 1):
            self._graph((position // BUCKET + 1) * BUCKET)()
        return self.ids_BS[:, : self.length].clone()
