"""`build_cache`: a transformers cache that stores the tokens a policy keeps, and nothing else.

`PolicyLayer` is the cache of one attention layer. Its `update` hands the new keys to `policy_attention`, the attention
function that transformers calls for the model, which stores them and attends to what is kept.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
)

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.families import TESTED_CACHES, get_family
from regard.policy.head_store import UNKNOWN_START, HeadStore, ScoreOptions, attend_to_store
from regard.policy.masking import FULL, KeptKeys
from regard.transformers.attention_function import REFUSED_ARGUMENTS, attention_forward, supports_sdpa

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


Tensor = Any  # the types of torch are not followed

NAME = "regard_policy"

# How hints apply a policy without its cache.
AS_MASKS = "regard.intervene(model, policy.edits())"

# Layer types with keys and values of every token.
ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

# Layer types without: their own cache layer is used.
STATE_TYPES = ("conv", "linear_attention", "mlp", "moe")


@dataclass
class Handover:
    """Keys on their way from the cache to the attention function; all layers of a cache share it."""

    config: PreTrainedConfig
    model_name: str
    layer: PolicyLayer | None = None  # whose keys were handed out last, until its attention was computed

    def build_error(self, received: str) -> ArgumentError:
        """Return the error for a model that cannot be served."""
        return ArgumentError(
            "policy.cache",
            received=f"{received} in {self.model_name}",
            expected="a model that passes what the cache returns to its attention function",
            hint="Call cache.reset() if a forward pass was interrupted. Otherwise this model family is not supported.",
        )


class PolicyLayer(CacheLayerMixin):  # type: ignore[misc]
    """Cache of one attention layer.

    `update` hands the new keys and values to the layer's attention function, which calls `attend`. Only there the mask
    is known, and with it the first token of each batch entry. The tokens that no later query needs are not stored.
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
                hint="Create the policy from a survey of this model.",
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
        """
        handover = self._handover
        if handover.config._attn_implementation != NAME:
            raise handover.build_error(f"attn_implementation={handover.config._attn_implementation!r}")
        if handover.layer is not None:
            raise handover.build_error("keys that did not reach the attention function")
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
        """
        assert self._staged is not None
        key, value = self._staged
        self._staged = self._handover.layer = None
        tokens = key.shape[2]
        self._length += tokens
        if mask is not None and mask.shape[-1] != self._length:
            raise self._handover.build_error(f"a mask over {mask.shape[-1]} keys after {self._length} tokens")
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
            output[:, heads, :, skipped:] = attend_to_store(
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
        """Remove the last tokens."""
        if tokens_to_remove > 0:
            raise ArgumentError(
                "cache.crop",
                received=str(tokens_to_remove),
                expected="the number of tokens to remove, as a negative number",
                hint=f"Call cache.crop({-tokens_to_remove}).",
            )
        tokens = min(-tokens_to_remove, self._length)
        if not self.can_crop(tokens):
            raise ArgumentError(
                "cache.crop",
                received=f"{tokens_to_remove} after tokens left their window",
                expected="tokens whose predecessors are still stored",
                hint="Call cache.activate_past_recording() before the steps that may be undone.",
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


def policy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask of a model, without the n² booleans where it consists of causality and padding.

    Args:
        batch_size: Number of batch entries.
        q_length: Number of queries.
        kv_length: Number of positions.
        q_offset: Position of the first query.
        kv_offset: First position.
        mask_function: Mask by batch entry, head, query and key.
        attention_mask: Tokens that are not padding, (batch, positions).
        **kwargs: Arguments of the mask function of `sdpa`.

    Returns:
        None if nothing is masked but later positions; (batch, 1, 1, positions) if padding is, too;
        (batch, 1, queries, positions) for other masks.
    """
    is_causal = mask_function is causal_mask_function and kwargs.get("allow_is_causal_skip", True)
    # Layers of a family without `sdpa` do not declare that they are causal, and need the mask with another cache.
    is_causal = is_causal and supports_sdpa(kwargs.get("config"))
    if is_causal and kv_offset == 0 and isinstance(q_offset, int) and q_offset + q_length == kv_length:
        if attention_mask is None:
            return None
        padding = attention_mask[:, :kv_length].bool()
        if padding.shape[1] == kv_length:
            return None if bool(padding.all()) else padding[:, None, None]
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs | {"allow_is_causal_skip": False},
    )


def policy_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Compute the attention of a layer over the tokens that its cache keeps, or over all without such a cache.

    Args:
        module: The layer.
        query: (batch, heads, q_len, head_dim).
        key: (batch, kv_heads, q_len, head_dim), as `PolicyLayer.update` returned it.
        value: (batch, kv_heads, q_len, value_dim), alike.
        attention_mask: As `policy_mask` returned it, or a mask of the caller over all positions.
        dropout: Dropout probability of the weights.
        scaling: Factor of the scores; None for 1/√head_dim.
        **kwargs: Further arguments of the model; `softcap` and `s_aux` have a meaning.

    Returns:
        The output, (batch, q_len, heads, value_dim), and None.
    """
    layer = getattr(key, "policy_layer", None)
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not isinstance(layer, PolicyLayer) or not layer.is_staged(key, value):
        if is_causal:
            attention_mask = _add_causality(attention_mask, query, key)
        others = kwargs | {"dropout": dropout, "scaling": scaling}
        return attention_forward(module, query, key, value, attention_mask, **others)
    if not is_causal:
        raise ArgumentError(
            "policy.cache",
            received=f"{type(module).__name__}, which attends to later tokens",
            expected="a decoder, whose tokens attend to earlier ones",
            hint="Set is_decoder=True in the configuration if the model has it.",
        )
    refused = REFUSED_ARGUMENTS | {"position_bias": "a bias for each pair of positions"}
    if kwargs.get("output_attentions"):
        refused = refused | {"output_attentions": "output_attentions=True"}
    for name, meaning in refused.items():
        if kwargs.get(name) is not None:
            raise ArgumentError(
                "policy.cache",
                received=f"{meaning} in {type(module).__name__}",
                expected="a model that passes a mask",
                hint=f"Apply the policy as masks instead: {AS_MASKS}.",
            )
    sink = kwargs.get("s_aux")
    softcap = kwargs.get("softcap")
    if dropout and (sink is not None or softcap is not None):
        raise ArgumentError(
            "policy.cache",
            received=f"dropout of {dropout:g} in a layer with a soft cap or a sink",
            expected="no dropout of attention weights",
            hint="Call model.eval().",
        )
    options = ScoreOptions(scaling, dropout, softcap, None if sink is None else sink.detach().reshape(-1))
    return layer.attend(query, attention_mask, options), None


def _add_causality(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Add to a mask the causality that `policy_mask` left out, for another cache or none."""
    q_len, kv_len = query.shape[-2], key.shape[-2]
    is_short = mask is not None and mask.dtype == torch.bool and mask.shape[-2] == 1
    if q_len == 1 or not (is_short or (mask is None and kv_len > q_len)):
        return mask
    causal = torch.ones((q_len, kv_len), dtype=torch.bool, device=query.device).tril(kv_len - q_len)
    return causal if mask is None else mask & causal


class PolicyCache(Cache):  # type: ignore[misc]
    """Cache whose attention layers store what a policy keeps; `policy.cache(model)` returns one."""

    @property
    def num_bytes(self) -> int:
        """Allocated bytes of keys and values."""
        return sum(layer.num_bytes for layer in self.layers if isinstance(layer, PolicyLayer))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of all layers, or of none."""
        blocked = [
            layer
            for layer in self.layers
            if isinstance(layer, PolicyLayer) and not layer.can_crop(-tokens_to_remove)
        ]
        for layer in [*blocked, *self.layers]:
            layer.crop(tokens_to_remove)


def build_cache(policy: KeptKeys, model: PreTrainedModel) -> Cache:
    """Return an empty cache for a model; see `CachePolicy.cache`."""
    if not isinstance(model, PreTrainedModel):
        raise ArgumentTypeError(
            "policy.cache",
            received=describe_argument(model),
            expected="a transformers model",
            hint=f"Apply the policy to other models as masks: {AS_MASKS}.",
        )
    if model.config.is_encoder_decoder:
        raise _refuse(
            model, "an encoder and a decoder", "its cross-attention keys have no distance to a query"
        )
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise _refuse(model, "no argument past_key_values", "its state is not a cache of keys and values")
    config = model.config.get_text_config(decoder=True)
    if own_cache := get_family(config.model_type).own_cache:
        raise _refuse(model, *own_cache)
    layer_types, settings = _read_layer_types(model, config)
    rows = _match_layers(policy, model, layer_types)
    if matches_config(policy, config, layer_types, rows):
        return DynamicCache(config=config)
    _set_implementation(model, config)
    if config.model_type not in TESTED_CACHES:
        warnings.warn(
            f"policy.cache: the family {config.model_type!r} has not been tested. Compare its outputs with the outputs "
            f"of the policy applied as masks: {AS_MASKS}.",
            stacklevel=3,
        )
    handover = Handover(config, type(model).__name__)
    layers = []
    for index, (layer_type, options) in enumerate(zip(layer_types, settings, strict=True)):
        if index not in rows:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**options))
            continue
        windows = [None if window == FULL else int(window) for window in policy.windows[rows[index]]]
        # The mask of the model hides what is behind its own window.
        if layer_type == "sliding_attention":
            own = options["sliding_window"]
            windows = [own if window is None else min(window, own) for window in windows]
        layers.append(PolicyLayer(windows, [int(count) for count in policy.sinks[rows[index]]], handover))
    return PolicyCache(layers=layers)


def matches_config(
    policy: KeptKeys, config: PreTrainedConfig, layer_types: list[str], rows: dict[int, int]
) -> bool:
    """Return whether the sliding layers of a configuration are exactly the windows of a policy.

    `rows` has the row of the policy for each attention layer.
    """
    windows = policy.windows
    if getattr(config, "layer_types", None) is None or (policy.sinks[windows != FULL] != 0).any():
        return False
    for index, row in rows.items():
        own = config.sliding_window if layer_types[index] == "sliding_attention" else FULL
        if layer_types[index] == "chunked_attention" or (windows[row] != own).any():
            return False
    return True


def _read_layer_types(
    model: PreTrainedModel, config: PreTrainedConfig
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the type of each layer and the arguments of its cache layer; raise if a type cannot be served."""
    if getattr(config, "num_kv_shared_layers", None):
        raise _refuse(
            model, "layers that share keys and values", "a policy per layer cannot evict shared keys"
        )
    if getattr(config, "kv_lora_rank", None):
        raise _refuse(
            model, "multi-head latent attention", "all heads share one cached latent for each token"
        )
    layer_types, settings = get_layer_types_and_kwargs(config)
    for layer_type in layer_types:
        if layer_type not in (*ATTENTION_TYPES, *STATE_TYPES):
            raise _refuse(
                model, f"layers of type {layer_type!r}", "their cache holds more than keys and values"
            )
    if not any(layer_type in ATTENTION_TYPES for layer_type in layer_types):
        raise _refuse(model, "no attention layer", "it has no cache of keys and values")
    return layer_types, settings


def _match_layers(policy: KeptKeys, model: PreTrainedModel, layer_types: list[str]) -> dict[int, int]:
    """Return the row of the policy for each attention layer, by the module's own index or in order."""
    expected = [index for index, layer_type in enumerate(layer_types) if layer_type in ATTENTION_TYPES]
    modules = dict(model.named_modules())
    named = [getattr(modules.get(name), "layer_idx", -1) for name in policy.layers]
    found = named if sorted(named) == expected else expected
    if len(found) != len(policy.windows):
        raise ArgumentError(
            "policy.cache",
            received=f"a policy of {len(policy.windows)} layers for {len(expected)} attention layers",
            expected="a policy with one row for each attention layer of the model",
            hint="Create the policy from a survey of this model.",
        )
    return {index: row for row, index in enumerate(found)}


def _set_implementation(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Let the decoder use the attention function of the policy; other parts of the model keep theirs."""
    AttentionInterface.register(NAME, policy_attention)
    AttentionMaskInterface.register(NAME, policy_mask)
    if config._attn_implementation == NAME:
        return
    reason = "its attention code does not use the AttentionInterface of transformers"
    names = [name for name in model.config.sub_configs if getattr(model.config, name) is config]
    try:
        model.set_attn_implementation({names[0]: NAME} if names else NAME)
    except ValueError as error:
        raise _refuse(model, "attention code of its own", reason) from error
    if config._attn_implementation != NAME:
        raise _refuse(model, "attention code of its own", reason)


def _refuse(model: PreTrainedModel, received: str, reason: str) -> ArgumentError:
    return ArgumentError(
        "policy.cache",
        received=f"{type(model).__name__} with {received}",
        expected="a decoder that computes attention through the AttentionInterface of transformers",
        hint=f"It is not supported, because {reason}. Apply the policy as masks: {AS_MASKS}.",
    )
