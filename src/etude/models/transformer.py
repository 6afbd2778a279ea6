"""A transformer over tokens, causal by default: pre-norm, rotary positions, torch's fused attention."""

import math
from typing import Annotated

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.arguments import checked
from etude.core.errors import ConfigError, TrainingError
from etude.models.attention import Attention, LayerCache, Seen, angles_at_once, attention_mask, rotary_angles
from etude.models.packed_attention import DocumentSpans, VarlenAttention, document_offsets, few_places
from etude.models.parts import gelu, takes_config
from etude.models.sampling import Temperature, TopK, TopP, evaluating, next_tokens

Size = Annotated[int, Ge(1)]

INIT_STD = 0.02


@register("model", "causal_transformer_lm")
@register("model", "transformer_lm")
class CausalTransformerLM(nn.Module):
    """Predicts the next token at every position.

    Pre-norm blocks without biases: attention with rotary positions, then two linear layers with GELU. The output
    layer shares its weights with the embedding unless `tie_embeddings` is off. With `n_types` every token also has a
    type (its modality, its role), whose embedding is added.

    >>> model = CausalTransformerLM(vocab_size=100, d_model=32, n_layers=2, n_heads=4, max_len=16)
    >>> model(torch.zeros(3, 16, dtype=torch.int64)).shape
    torch.Size([3, 16, 100])
    >>> model.num_parameters()
    27936
    """

    @takes_config
    def __init__(
        self,
        vocab_size: Size,
        n_types: Annotated[int, Ge(0)] = 0,
        d_model: Size = 768,
        n_layers: Annotated[int, Ge(1), Le(10_000)] = 12,
        n_heads: Size = 12,
        d_ff: Size | None = None,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.1,
        max_len: Size = 2048,
        tie_embeddings: bool = True,
    ) -> None:
        """Build the model; `d_ff`, the hidden width of a block's MLP, is 4·d_model by default."""
        super().__init__()
        if d_model % (2 * n_heads):
            raise ConfigError(
                f"d_model {d_model} with n_heads {n_heads}: every head needs an even number of features; "
                f"make d_model a multiple of {2 * n_heads}"
            )
        self.vocab_size, self.n_types, self.max_len = vocab_size, n_types, max_len
        self.n_heads, self.head_dim = n_heads, d_model // n_heads
        self.packed_attention = VarlenAttention()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.type_embedding = nn.Embedding(n_types, d_model) if n_types else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(d_model, n_heads, d_ff or 4 * d_model, dropout) for _ in range(n_layers)
        )
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again.

        As in GPT-2, all weights are small, and projections into the residual stream start smaller in deep models. The
        initial loss is then close to log(vocab_size).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            else:
                residual = name.endswith(("attention.project.weight", "mlp.down.weight"))
                std = INIT_STD / math.sqrt(2 * len(self.blocks)) if residual else INIT_STD
                nn.init.normal_(parameter, std=std)

    def num_parameters(self) -> int:
        """Return the number of parameters; shared weights count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def feature_dim(self) -> int:
        """The last dimension of `features`, d_model."""
        return self.head.in_features

    def tensor_plan(self, size: int) -> dict[str, str]:
        """Return how `size` processes divide the layers: every process has some of the heads and of the vocabulary.

        Raises ConfigError if the heads cannot be divided evenly.
        """
        if self.n_heads % size:
            raise ConfigError(f"parallel.tensor is {size}, which does not divide n_heads {self.n_heads} of the model")
        return {
            "embedding": "rowwise",
            "blocks.*.attention.qkv": "colwise",
            "blocks.*.attention.project": "rowwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "head": "colwise_gathered",
        }

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output layer, for losses that run the model without it (`fused_head`)."""
        return self.head

    def forward(
        self,
        tokens: Tensor,
        types: Tensor | None = None,
        attn_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor:
        """Return the logits (B, L, V) of tokens (B, L); all tensors but `document_starts` have that shape.

        Positions where `attn_mask` is 0 are padding: no other position attends to them. With `document_ids` a
        position attends only to its own document. `document_starts` (B, starts) may also give the start of documents
        in their rows (`PackedDocuments`): a GPU in half precision without dropout then needs no mask. `position_ids`
        count from 0 by default; only their differences matter. With `causal=False` a position also attends to later
        ones, as for predicting masked tokens.
        """
        hidden = self.features(
            tokens,
            types,
            attn_mask,
            position_ids=position_ids,
            document_ids=document_ids,
            document_starts=document_starts,
            causal=causal,
        )
        logits: Tensor = self.head(hidden)
        return logits

    def features(
        self,
        tokens: Tensor,
        types: Tensor | None = None,
        attn_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor:
        """Return the hidden states (B, L, d_model) that the output layer receives; arguments as of `forward`."""
        self._check(tokens, types, attn_mask)
        mask: Seen = None
        if attn_mask is None and document_ids is not None and document_starts is not None:
            mask = self._packed(document_starts, tokens)
        if mask is None:
            mask = attention_mask(tokens, attn_mask, document_ids, causal=causal)
        return self._hidden(tokens, types, mask, position_ids, causal=causal)

    @checked
    def generate(
        self,
        prompt_ids: Tensor,
        max_new_tokens: int,
        temperature: Temperature = 1.0,
        top_k: TopK = None,
        top_p: TopP = None,
        generator: torch.Generator | None = None,
        stop_id: int | None = None,
        *,
        types: Tensor | None = None,
    ) -> Tensor:
        """Return prompts (L,) or (B, L) followed by up to `max_new_tokens` sampled tokens.

        Temperature 0 takes the most likely token. A row that has drawn `stop_id` is padded with it, and generation
        ends once all rows have. Beyond `max_len` the context is the last max_len/2 tokens. New tokens have the last
        of `types`. Random numbers come from `generator`, else from torch's global one.
        """
        tokens = prompt_ids if prompt_ids.dim() == 2 else prompt_ids[None]
        types = None if types is None else types.reshape(tokens.shape)
        if tokens.shape[1] == 0:
            raise TrainingError(
                "generate needs a prompt of at least one token; pass the token that begins a document"
            )
        with evaluating(self):
            fresh, cache = tokens[:, -self.max_len :], self._new_cache()
            stopped = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
            for _ in range(max_new_tokens):
                fresh_types = None if types is None else types[:, -fresh.shape[1] :]
                logits = self._next_logits(fresh, fresh_types, cache)
                chosen = next_tokens(logits, temperature, top_k, top_p, generator)
                if stop_id is not None:
                    chosen = chosen.masked_fill(stopped, stop_id)
                    stopped |= chosen == stop_id
                tokens, fresh = torch.cat([tokens, chosen[:, None]], 1), chosen[:, None]
                types = None if types is None else torch.cat([types, types[:, -1:]], 1)
                if stop_id is not None and bool(stopped.all()):  # synchronises
                    break
                if cache[0].length == self.max_len:
                    fresh, cache = tokens[:, -max(1, self.max_len // 2) :], self._new_cache()
        return tokens if prompt_ids.dim() == 2 else tokens[0]

    def _check(self, tokens: Tensor, types: Tensor | None, attn_mask: Tensor | None) -> None:
        if tokens.dim() != 2:
            raise TrainingError(f"tokens have the shape {tuple(tokens.shape)}; pass (batch, length)")
        if tokens.shape[1] > self.max_len:
            raise TrainingError(
                f"sequences have {tokens.shape[1]} tokens, but the model's max_len is {self.max_len}; "
                f"increase max_len or use shorter sequences"
            )
        if (types is not None) != (self.n_types > 0):
            found = "no types were given" if types is None else "types were given"
            raise TrainingError(
                f"{found}, but the model has n_types {self.n_types}; set n_types to the number of types"
            )
        if attn_mask is not None and attn_mask.shape != tokens.shape:
            raise TrainingError(
                f"attn_mask has the shape {tuple(attn_mask.shape)}; pass 1 for tokens and 0 for padding in the "
                f"shape of the tokens, {tuple(tokens.shape)}"
            )

    def _packed(self, document_starts: Tensor, tokens: Tensor) -> DocumentSpans | None:
        """Return the documents for attention without a mask, or None if that is not possible or not worthwhile."""
        (rows, length), device = tokens.shape, tokens.device
        if (self.training and self.dropout.p > 0) or not few_places(document_starts, length):
            return None
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else self.embedding.weight.dtype
        if not self.packed_attention.takes(device, dtype, self.head_dim):
            return None
        return DocumentSpans(self.packed_attention, document_offsets(document_starts, rows, length), length)

    def _hidden(
        self,
        tokens: Tensor,
        types: Tensor | None,
        mask: Seen,
        position_ids: Tensor | None,
        cache: "list[LayerCache] | None" = None,
        causal: bool = True,
    ) -> Tensor:
        x = self.embedding(tokens)
        if self.type_embedding is not None:
            x = x + self.type_embedding(types)
        x = self.dropout(x)
        start = cache[0].length if cache else 0
        if position_ids is None:
            position_ids = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        # A compiler would recompute the cosines in every layer, unless they are opaque to it.
        at_once = torch.compiler.is_compiling() and not torch.compiler.is_exporting()  # programs run without etude
        angles = angles_at_once if at_once else rotary_angles
        rotary = angles(position_ids, self.head_dim)
        for place, block in enumerate(self.blocks):
            x = block(x, rotary, mask, cache[place] if cache else None, causal)
        normed: Tensor = self.norm(x)
        return normed

    def _next_logits(self, tokens: Tensor, types: Tensor | None, cache: list[LayerCache]) -> Tensor:
        """Return the logits (B, V) after `tokens`, which follow the tokens in the cache."""
        self._check(tokens, types, None)
        logits: Tensor = self.head(self._hidden(tokens, types, None, None, cache)[:, -1])
        return logits

    def _new_cache(self) -> list[LayerCache]:
        return [LayerCache(self.max_len, self.embedding.weight.dtype) for _ in self.blocks]


class TransformerBlock(nn.Module):
    """Attention and an MLP, each with pre-norm and a residual connection."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model)
        self.attention = Attention(d_model, n_heads, dropout)
        self.mlp_norm = nn.RMSNorm(d_model)
        self.mlp = FeedForward(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Seen,
        cache: LayerCache | None = None,
        causal: bool = True,
    ) -> Tensor:
        """Return the next residual stream (B, L, D)."""
        shape = x.shape
        x = x.flatten(0, 1)  # as the linear layers have it: a compiler then casts gradients where it adds them
        attended = self.attention(self.attention_norm(x).view(shape), rotary, mask, cache, causal)
        x = x + self.dropout(attended.flatten(0, 1))
        added: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return added.view(shape)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(gelu(up(x)))."""
        result: Tensor = self.down(gelu(self.up(x)))
        return result
