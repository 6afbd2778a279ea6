"""A transformer text classifier."""

from typing import Annotated

from annotated_types import Ge, Lt
from torch import Tensor, nn

from etude.config.registry import register
from etude.models.parts import takes_config
from etude.models.transformer import INIT_STD, CausalTransformerLM

Size = Annotated[int, Ge(1)]


@register("model", "text_classifier")
class TextClassifier(nn.Module):
    """A linear layer on the mean of a transformer's hidden states over the tokens of a text.

    Every position attends to all others except padding.

    >>> import torch
    >>> model = TextClassifier(vocab_size=257, num_classes=3, d_model=16, n_layers=1, n_heads=2)
    >>> model(torch.zeros(4, 10, dtype=torch.int64)).shape
    torch.Size([4, 3])
    """

    @takes_config
    def __init__(
        self,
        vocab_size: Size,
        num_classes: Size,
        d_model: Size = 128,
        n_layers: Size = 2,
        n_heads: Size = 4,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.1,
        max_len: Size = 2048,
    ) -> None:
        super().__init__()
        # The language model's output layer is tied to the embedding and never called.
        self.trunk = CausalTransformerLM(
            vocab_size, d_model=d_model, n_layers=n_layers, n_heads=n_heads, dropout=dropout, max_len=max_len
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(d_model, num_classes)
        nn.init.normal_(self.head.weight, std=INIT_STD)
        nn.init.zeros_(self.head.bias)

    @property
    def feature_dim(self) -> int:
        """The last dimension of `features`, d_model."""
        return self.head.in_features

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output layer."""
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits (B, num_classes) of tokens (B, L); `attention_mask` is 0 at padding."""
        logits: Tensor = self.head(self.features(input_ids, attention_mask))
        return logits

    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the mean hidden state (B, d_model) of each text; 0 for one without tokens."""
        hidden = self.trunk.features(input_ids, attn_mask=attention_mask, causal=False)
        if attention_mask is None:
            pooled = hidden.mean(1)
        else:
            mask = attention_mask.to(hidden.dtype).unsqueeze(-1)
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        features: Tensor = self.dropout(pooled)
        return features
