"""`PolicyLayer`: the cache of one attention layer, with as many tokens per kv head as the policy keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from regard.errors import ArgumentError
from regard.policy.head_attention import ScoreOptions, attend
from regard.policy.head_store import UNKNOWN_START, HeadStore

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Tensor = Any  # the types of torch are not followed

NAME = "regard_policy"


@dataclass
class Handover:
    """Keys on their way from the cache to the attention function; all layers of a cache share it.

    Args:
        config: Configuration that names the attention implementation of the model.
        model_name: Class of the model, for messages.
        layer: The layer whose keys were handed out last, until its attention was computed.
    """

    config: PreTrainedConfig
    model_name: str
    layer: PolicyLayer | None = None

    def refuse(self, received: str) -> ArgumentError:
        """Return the error for a model that cannot be served."""
        return ArgumentError(
            "policy.cache",
            received=f"{received} in {self.model_name}",
            expected="a model that passes what the cache returns to its attention function",
            hint="Call cache.reset() if a forward pass was interrupted. Otherwise this family cannot be served.",
        )


class PolicyLayer(CacheLayerMixin):  # type: ignore[misc]
    """Cache of one attention layer.

    `update` hands the new keys and values to the layer's attention function, which calls `attend`. Only there the mask
    is known, and with it the first token of each batch entry. The tokens that no later query needs are not stored.

    Args:
        windows: Window of each kv head, None for all tokens.
        sinks: Sinks of each kv head.
        handover: Shared by the layers of the cache.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, windows: list[int | None], sinks: list[int], handover: Handover) -> None:
        super().__init__()
        groups: dict[tuple[int | None, int], list[int]] = {}
        for head, (window, count) in enumerate(zip(windows, sinks, strict=True)):
            groups.setdefault((window, 0 if window is None else count), []).append(head)
        self.stores = [HeadStore(heads, window, count) for (window, count), heads in groups.items()]
        self.num_heads = len(windows)
        self._handover = handover
        self._clear()

    def _clear(self) -> None:
        self._length = 0
        self._origin: int | None = None
        self._starts: Tensor | None = None
        self._staged: tuple[Tensor, Tensor] | None = None
        self.is_initialized = False

    def __repr__(self) -> str:
        kinds = ", ".join(
            f"{len(store.heads)} × {'all' if store.window is None else f'{store.sinks} + {store.window}'}"
            for store in self.stores
        )
        return f"PolicyLayer({kinds})"

    @property
    def num_bytes(self) -> int:
        """Allocated bytes."""
        return sum(store.num_bytes for store in self.stores)

    @property
    def record_past(self) -> bool:
        """Whether tokens that leave a window are kept until `crop`."""
        return self.stores[0].record_past

    @record_past.setter
    def record_past(self, record_past: bool) -> None:
        for store in self.stores:
            store.record_past = record_past

    def activate_past_recording(self) -> None:
        """Keep tokens that leave a window until `crop`, so that it can restore them."""
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Check the number of kv heads; slots are allocated when tokens are stored."""
        if key_states.shape[1] != self.num_heads:
            raise ArgumentError(
                "policy.cache",
                received=f"keys of {key_states.shape[1]} heads in {self._handover.model_name}",
                expected=f"the {self.num_heads} kv heads of the policy",
                hint="Make the policy from a survey of this model.",
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand out the new keys and values to the attention function.

        Args:
            key_states: (batch, kv_heads, tokens, head_dim).
            value_states: (batch, kv_heads, tokens, value_dim).
            *args: Ignored.
            **kwargs: Ignored.

        Returns:
            The new keys and values, marked for the attention function; not those that are stored.

        Raises:
            ArgumentError: If the model does not use the attention function of the policy, gradients are required, or
                the number of heads is not the policy's.
        """
        handover = self._handover
        if handover.config._attn_implementation != NAME:
            raise handover.refuse(f"attn_implementation={handover.config._attn_implementation!r}")
        if handover.layer is not None:
            raise handover.refuse("keys that did not reach the attention function")
        if key_states.requires_grad:
            raise ArgumentError(
                "policy.cache",
                received="keys that require gradients",
                expected="a forward pass without gradients: evicted tokens have none",
                hint="Run the model in torch.no_grad().",
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._staged = key_states.detach(), value_states.detach()
        for tensor in self._staged:
            tensor.policy_layer = self
        handover.layer = self
        return self._staged

    def is_staged(self, key: Tensor, value: Tensor) -> bool:
        """Return whether these are the tensors that `update` handed out last."""
        return self._staged is not None and key is self._staged[0] and value is self._staged[1]

    def attend(self, query: Tensor, mask: Tensor | None, options: ScoreOptions) -> Tensor:
        """Store the tokens that `update` handed out, and return the attention of their queries.

        Args:
            query: (batch, heads, tokens, head_dim).
            mask: Mask of the model over all positions, True = attend, or added to the scores: (batch or 1, heads or 1,
                tokens or 1, positions). None if nothing is masked but later positions.
            options: How weights are computed; `sink` is (heads,).

        Returns:
            (batch, tokens, heads, value_dim).

        Raises:
            ArgumentError: If the mask does not have a column for every position.
        """
        assert self._staged is not None
        key, value = self._staged
        self._staged = self._handover.layer = None
        tokens = key.shape[2]
        self._length += tokens
        if mask is not None and mask.shape[-1] != self._length:
            raise self._handover.refuse(f"a mask over {mask.shape[-1]} keys after {self._length} tokens")
        if mask is None and self._origin is None:
            self._origin = 0
        if mask is not None:
            self._find_starts(mask, key.shape[0])
            mask = mask[..., self._origin or 0 :]
            per_kv_head = (self.num_heads, -1) if mask.shape[1] > 1 else (1, 1)
            mask = mask.unflatten(1, per_kv_head)
        query = query.unflatten(1, (self.num_heads, -1))
        if self._origin is None:  # padding alone, which no query attends to
            return value.new_zeros((query.shape[0], tokens, query.shape[1] * query.shape[2], value.shape[3]))
        skipped = max(self._origin - (self._length - tokens), 0)
        if skipped:
            key, value, rows = key[:, :, skipped:], value[:, :, skipped:], query[:, :, :, skipped:]
            mask = mask if mask is None or mask.shape[3] == 1 else mask[:, :, :, skipped:]
        else:
            rows = query
        if self._starts is not None:
            key, value = self._clear_padding(key), self._clear_padding(value)
        if options.sink is not None:
            options = replace(options, sink=options.sink.unflatten(0, query.shape[1:3]))
        output = value.new_zeros((*query.shape[:4], value.shape[3]))
        for store in self.stores:
            heads = store.index
            chosen = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
            output[:, heads, :, skipped:] = attend(
                store,
                rows[:, heads],
                key[:, heads],
                value[:, heads],
                chosen,
                self._starts,
                options.select(heads),
            )
        return output.flatten(1, 2).transpose(1, 2).contiguous()

    def _clear_padding(self, states: Tensor) -> Tensor:
        """Set the padding of each batch entry to zero: a NaN in it would reach the output with a weight of zero."""
        assert self._starts is not None and self._origin is not None
        first = self._length - self._origin - states.shape[2]
        positions = torch.arange(first, first + states.shape[2], device=states.device)
        return states.masked_fill((positions < self._starts[:, None])[:, None, :, None], 0)

    def _find_starts(self, mask: Tensor, batch: int) -> None:
        """Find the first token of each batch entry: the first that any query attends to."""
        if self._origin is not None and (self._starts is None or bool((self._starts < UNKNOWN_START).all())):
            return
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        visible = visible.any(2).any(1).expand(batch, -1)
        starts = torch.where(visible.any(1), visible.int().argmax(1), UNKNOWN_START)
        if self._origin is None:
            first = int(starts.min())
            if first == UNKNOWN_START:
                return
            self._origin = first
        else:
            assert self._starts is not None
            starts = torch.where(self._starts < UNKNOWN_START, self._starts + self._origin, starts)
        relative = torch.where(starts < UNKNOWN_START, starts - self._origin, starts)
        self._starts = relative if bool((relative > 0).any()) else None

    def get_seq_length(self) -> int:
        """Return the number of tokens that the layer has seen, evicted ones included."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the mask: it covers all positions, of which each kv head keeps some."""
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """Return −1: sequences may have any length."""
        return -1

    def reset(self) -> None:
        """Release everything that is stored."""
        for store in self.stores:
            store.reset()
        self._handover.layer = None
        self._clear()

    def can_crop(self, tokens: int) -> bool:
        """Return whether the last tokens can be removed: whether what left the windows since then is still stored."""
        return all(store.can_crop(tokens) for store in self.stores)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: Minus their number; 0 releases what `activate_past_recording` keeps.

        Raises:
            ArgumentError: If the number is positive, or tokens of a window were evicted since.
        """
        if tokens_to_remove > 0:
            raise ArgumentError(
                "cache.crop",
                received=str(tokens_to_remove),
                expected="minus the number of tokens to remove",
                hint=f"cache.crop({-tokens_to_remove})",
            )
        tokens = min(-tokens_to_remove, self._length)
        if not self.can_crop(tokens):
            raise ArgumentError(
                "cache.crop",
                received=f"{tokens_to_remove} after tokens left their window",
                expected="tokens whose predecessors are still stored",
                hint="Call cache.activate_past_recording() before the steps that may be taken back.",
            )
        self._length -= tokens
        if self._origin is not None:
            for store in self.stores:
                store.crop(min(tokens, store.length))
            if self._length <= self._origin:
                self._origin = self._starts = None
            elif self._starts is not None:
                self._starts = self._starts.masked_fill(
                    self._starts >= self._length - self._origin, UNKNOWN_START
                )

    def _select(self, indices: Tensor) -> None:
        for store in self.stores:
            store.select(indices)
        if self._starts is not None:
            self._starts = self._starts.index_select(0, indices.to(self._starts.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the batch entries by those at some indices, for beam search."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the batch entries at some indices."""
        self._select(torch.as_tensor(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry."""
        if self.stores[0].length:
            batch = self.stores[0].slots[0].shape[0]
            self._select(torch.arange(batch).repeat_interleave(repeats))
