"""Save the stories model in the format of transformers, so that vLLM can serve it.

    python -m examples.serving.save_model stories-model

It needs torch and transformers. The architecture is that of Arcee's models: RMSNorm, rotary positions, and an MLP with
squared ReLU.
"""

import sys

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

import regard


def save_model(path: str) -> None:
    """Save the model and its tokenizer in a folder."""
    stories = regard.models.load("stories")
    gpt, config = stories.model, stories.model.config
    model = transformers.ArceeForCausalLM(
        transformers.ArceeConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            head_dim=config.width // config.heads,
            hidden_act=config.activation,
            max_position_embeddings=1024,
            rms_norm_eps=torch.finfo(torch.float32).eps,
            mlp_bias=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    names = {"embedding": "model.embed_tokens", "norm": "model.norm", "unembedding": "lm_head"}
    for number in range(config.layers):
        ours, theirs = f"layers.{number}.", f"model.layers.{number}."
        names |= {ours + f"attention.{name}_proj": theirs + f"self_attn.{name}_proj" for name in "qkv"}
        names |= {
            ours + "attention.out_proj": theirs + "self_attn.o_proj",
            ours + "norm": theirs + "input_layernorm",
            ours + "mlp.0": theirs + "post_attention_layernorm",
            ours + "mlp.1": theirs + "mlp.up_proj",
            ours + "mlp.3": theirs + "mlp.down_proj",
        }
    weights = {
        f"{names[module]}.{kind}": tensor
        for module, _, kind, tensor in (
            (*name.rpartition("."), value) for name, value in gpt.state_dict().items()
        )
    }
    model.load_state_dict(weights)
    model.save_pretrained(path)

    # The longest piece from left to right, after a newline and a space before each line.
    pieces = {stories.tokenizer.decode([token]): token for token in range(config.vocabulary)}
    tokenizer = Tokenizer(
        models.WordPiece(pieces, unk_token="?", continuing_subword_prefix="", max_input_chars_per_word=10**9)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"[^\n -~]"), "?"),
            normalizers.Replace(Regex(r"(?m)^(?=[^\n])"), " "),
            normalizers.Prepend("\n"),
        ]
    )
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    ).save_pretrained(path)


if __name__ == "__main__":
    save_model(sys.argv[1])
