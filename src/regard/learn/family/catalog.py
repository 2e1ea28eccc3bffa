"""The fifteen mechanisms in the order of the book, and published variants by name, each run on the example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from regard.core.attention import attention, linear_attention
from regard.core.products import merge
from regard.feature_maps import random_features
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.examples import Example, cat
from regard.learn.family import variants
from regard.learn.family.mechanism import Mechanism, OutputAndWeights
from regard.learn.validation import Floats
from regard.masks import Mask, between, causal, dense, document, first, sliding_window
from regard.render.table import format_table

TRANSFORMER = "Vaswani et al. 2017, arXiv 1706.03762"
T5 = "Raffel et al. 2019, arXiv 1910.10683"
GPT_3 = "Brown et al. 2020, arXiv 2005.14165"
MISTRAL = "Jiang et al. 2023, arXiv 2310.06825"
GEMMA_2 = "Gemma Team 2024, arXiv 2408.00118"
GPT_OSS = "OpenAI 2025, arXiv 2508.10925"


def run_token_by_token(attention: variants.Cached, example: Example) -> OutputAndWeights:
    """Run one call per token; rows of weights are padded with zeros for the keys that are not cached yet."""
    weights, outputs = np.zeros((len(example.Q), len(example.K))), []
    for i in range(len(example.Q)):
        output, row = attention(example.Q[i : i + 1], example.K[i : i + 1], example.V[i : i + 1])
        weights[i, : i + 1] = row[0]
        outputs.append(output[0])
    return np.stack(outputs), weights


def share_kv_heads(num_heads: int, num_kv_heads: int) -> Example:
    """Build the example with fewer heads of keys and values: each group is replaced by its mean."""
    K, V = (
        variants.mean_pool_heads(cat.K, num_heads, num_kv_heads),
        variants.mean_pool_heads(cat.V, num_heads, num_kv_heads),
    )
    return Example(cat.tokens, cat.Q, K, V)


# The fifteen mechanisms in the order of the chapter; `family.show` and `family.table` print them.
MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism(
        name="scaled_dot_product",
        title="Scaled dot product",
        problem="Each token should be able to gather information from all other tokens at once, and find it by "
        "content, wherever it is in the sequence.",
        changes="nothing: the four steps",
        formula="weights = softmax(Q Kᵀ / √d_k)\noutput  = weights V",
        latex=r"A = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_k}}\right), \qquad O = A V",
        setting="One head of four columns. All other mechanisms are compared with it.",
        sources={"The Transformer; the other mechanisms here modify it": TRANSFORMER},
        attention_class=ScaledDotProductAttention,
        options={"d_k": 4},
    ),
    Mechanism(
        name="multi_head",
        title="Multi-head",
        problem="One row of weights can express only one relation: it cannot attend to the verb for one reason "
        "and to the noun for another. Several heads attend in parallel, each with its own columns.",
        changes="columns split before, merged after",
        formula="head h = attention(Qₕ, Kₕ, Vₕ)\noutput = [head 0, head 1, …]",
        latex=r"O_h = \operatorname{attention}(Q_h, K_h, V_h), \qquad O = [\,O_0, O_1, \ldots\,]",
        setting="Two heads of two columns: 0 and 1, 2 and 3. A layer projects before and after; here the columns "
        "are used as they are.",
        sources={
            "The Transformer: 8 heads of 64 columns": TRANSFORMER,
            "BERT base: 12 heads of 64": "Devlin et al. 2018, arXiv 1810.04805",
            "GPT-3: 96 heads of 128": GPT_3,
        },
        attention_class=variants.MultiHead,
        options={"d_k": 2, "num_heads": 2},
    ),
    Mechanism(
        name="causal",
        title="Causal",
        problem="A model that predicts the next token must not see it. For each query, the keys after its own "
        "position are masked, so all positions of a text can be trained in one pass.",
        changes="the mask: no later keys",
        formula="score(i, j) = −∞ where j > i",
        latex=r"S_{ij} = -\infty \quad \text{for } j > i",
        setting="Row 0 attends to itself only, so row 3 is worked out too.",
        sources={
            "The Transformer's decoder": TRANSFORMER,
            "GPT-2 and its successors": "Radford et al. 2019, OpenAI report",
        },
        attention_class=variants.Causal,
        base_classes=(variants.Masked,),
        options={"d_k": 4},
        worked_rows=(0, 3),
    ),
    Mechanism(
        name="cross",
        title="Cross",
        problem="A translation must look at the sentence it translates, an image at the words that describe it. "
        "The queries come from one sequence, the keys and values from another.",
        changes="the inputs: two sequences",
        formula="Q from one sequence, K and V from another\nweights are (q_len, kv_len), rarely square",
        latex=r"Q = X W_Q, \quad K = Y W_K, \quad V = Y W_V, \qquad A \in \mathbb{R}^{|X| \times |Y|}",
        setting='The queries of "on" and "mat" attend to the keys and values of "The", "cat" and "sat".',
        sources={
            "The Transformer: the decoder attends to the encoder": TRANSFORMER,
            "T5": T5,
            "Whisper: text attends to audio": "Radford et al. 2022, arXiv 2212.04356",
            "Latent diffusion: an image attends to its caption": "Rombach et al. 2021, arXiv 2112.10752",
        },
        attention_class=variants.Cross,
        options={"d_k": 4},
        example=Example(cat.tokens[:3], cat.Q[3:], cat.K[:3], cat.V[:3]),
        query_tokens=cat.tokens[3:],
    ),
    Mechanism(
        name="multi_query",
        title="Multi-query",
        problem="During generation, each new token reads the keys and values of all tokens so far, and that "
        "memory traffic takes most of the time. With one key and value head for all query heads, there is "
        "far less to read.",
        changes="one key and value head",
        formula="head h = attention(Qₕ, K, V)",
        latex=r"O_h = \operatorname{attention}(Q_h, K, V)",
        setting="Two query heads. The one key head, and the one value head, is the mean of the original two.",
        sources={
            "Proposed for fast decoding": "Shazeer 2019, arXiv 1911.02150",
            "PaLM": "Chowdhery et al. 2022, arXiv 2204.02311",
            "StarCoder": "Li et al. 2023, arXiv 2305.06161",
        },
        attention_class=variants.MultiQuery,
        base_classes=(variants.GroupedQuery,),
        options={"d_k": 2, "num_heads": 2},
        example=share_kv_heads(num_heads=2, num_kv_heads=1),
    ),
    Mechanism(
        name="grouped_query",
        title="Grouped-query",
        problem="One key head for all query heads costs quality; one for each costs memory. If groups of query "
        "heads share one, the quality is nearly that of many and the cost nearly that of one.",
        changes="keys and values shared by groups",
        formula="head h = attention(Qₕ, K_g, V_g),  g = ⌊h · kv_heads / heads⌋",
        latex=r"O_h = \operatorname{attention}(Q_h, K_g, V_g), \qquad g = \lfloor h \, H_{kv} / H \rfloor",
        setting="Four query heads of one column, two key and value heads. Each key head is the mean of the two it "
        "replaces, and serves two consecutive query heads.",
        sources={
            "Proposed, starting from the mean of trained heads": "Ainslie et al. 2023, arXiv 2305.13245",
            "Llama 2 70B: 64 query heads, 8 key heads": "Touvron et al. 2023, arXiv 2307.09288",
            "Mistral 7B: 32 query heads, 8 key heads": MISTRAL,
        },
        attention_class=variants.GroupedQuery,
        options={"d_k": 1, "num_heads": 4, "num_kv_heads": 2},
        example=share_kv_heads(num_heads=4, num_kv_heads=2),
    ),
    Mechanism(
        name="relative_bias",
        title="Relative position bias (T5)",
        problem="Attention does not see order. A learned number for each distance between query and key is added "
        "to the score. Large distances share a number, so a small table serves any length.",
        changes="a bias per bucket of distances",
        formula="score(i, j) = qᵢ·kⱼ / √d_k + table[bucket(j − i)]",
        latex=r"S_{ij} = \frac{q_i \cdot k_j}{\sqrt{d_k}} + b_{\operatorname{bucket}(j - i)}",
        setting="Eight buckets: four for keys at or before the query, four for keys after it; 2 and 3 steps share "
        "one. A model learns the table; here it favours near keys. T5 itself does not divide by √d_k.",
        sources={"T5: 32 buckets up to a distance of 128, a table for each head": T5},
        attention_class=variants.RelativeBias,
        base_classes=(variants.Biased,),
        options={
            "d_k": 4,
            "table": (0.5, 0.25, 0.0, -0.5, 0.0, 0.25, -0.25, -0.75),
            "max_distance": 6,
        },
    ),
    Mechanism(
        name="rotary",
        title="Rotary",
        problem="Position vectors that are added to the tokens mix with their content. Rotating queries and keys "
        "by an angle that grows with the position keeps their lengths, and makes the dot product depend "
        "on the distance only.",
        changes="Q and K rotated by position",
        formula="score(i, j) = R(i)qᵢ · R(j)kⱼ / √d_k = qᵢ · R(j − i)kⱼ / √d_k\n"
        "R(p) turns pair c by the angle p · base^(−2c/d_k)",
        latex=r"S_{ij} = \frac{(R_i q_i) \cdot (R_j k_j)}{\sqrt{d_k}} = \frac{q_i \cdot R_{j-i} k_j}{\sqrt{d_k}}, "
        r"\qquad \theta_c = \text{base}^{-2c/d_k}",
        setting='Entries 0 and 2 are a pair, 1 and 3 another (the "half" layout; the paper pairs neighbours). '
        "With base 100, one step rotates them by 1 and by 0.1; the published base is 10 000.",
        sources={
            "Proposed": "Su et al. 2021, arXiv 2104.09864",
            "GPT-NeoX-20B, on a quarter of the columns": "Black et al. 2022, arXiv 2204.06745",
            "LLaMA and its successors": "Touvron et al. 2023, arXiv 2302.13971",
        },
        attention_class=variants.Rotary,
        options={"d_k": 4, "base": 100.0},
    ),
    Mechanism(
        name="alibi",
        title="ALiBi",
        problem="A model with learned positions meets positions it never saw in training when a text is longer. A "
        "linear penalty on the distance needs no learning and works at any length.",
        changes="a linear penalty on distance",
        formula="score(i, j) = qᵢ·kⱼ / √d_k − slope · |i − j|",
        latex=r"S_{ij} = \frac{q_i \cdot k_j}{\sqrt{d_k}} - m \, |i - j|",
        setting="A slope of 1/2, the steepest of eight heads. Published models are causal; here each token "
        "attends to both sides.",
        sources={
            "Proposed": "Press et al. 2021, arXiv 2108.12409",
            "BLOOM": "BigScience 2022, arXiv 2211.05100",
            "MPT-7B": "MosaicML 2023, announcement",
        },
        attention_class=variants.ALiBi,
        base_classes=(variants.Biased,),
        options={"d_k": 4, "slope": 0.5},
    ),
    Mechanism(
        name="linear",
        title="Linear (kernel feature map)",
        problem="The table of weights grows with the square of the length. If a weight is a plain product "
        "φ(q)·φ(k), the sums over the keys can be computed first, and the table is never needed.",
        changes="φ(q)·φ(k) instead of the exponential",
        formula="weight(i, j) = φ(qᵢ)·φ(kⱼ) / Σₘ φ(qᵢ)·φ(kₘ)\n"
        "output(i) = φ(qᵢ)S / φ(qᵢ)·z,  S = Σ φ(kⱼ)vⱼᵀ,  z = Σ φ(kⱼ)",
        latex=r"O_i = \frac{\phi(q_i)^\top S}{\phi(q_i)^\top z}, \qquad "
        r"S = \sum_j \phi(k_j) v_j^\top, \quad z = \sum_j \phi(k_j)",
        setting="φ(x) = elu(x) + 1, which is x + 1 wherever x is not negative, as here. The price: the weights "
        "are much more even than those of softmax.",
        sources={
            "Proposed, with this φ": "Katharopoulos et al. 2020, arXiv 2006.16236",
            "Performer: random features instead of φ": "Choromanski et al. 2020, arXiv 2009.14794",
            "MiniMax-01: seven of eight layers, without softmax": "MiniMax 2025, arXiv 2501.08313",
        },
        attention_class=variants.Linear,
        options={"d_k": 4},
    ),
    Mechanism(
        name="sliding_window",
        title="Sliding window",
        problem="Most of what a token needs is near. If it attends to the last few tokens only, time and memory "
        "grow with the length, not with its square. Information from farther away arrives through the "
        "layers below.",
        changes="the mask: only the last few keys",
        formula="score(i, j) = −∞ unless i − size < j ≤ i",
        latex=r"S_{ij} = -\infty \quad \text{unless } i - w < j \le i",
        setting="A window of 3, the query's own position included. Row 0 attends to itself only, so row 4 is "
        "worked out too.",
        sources={
            "Longformer, on both sides": "Beltagy et al. 2020, arXiv 2004.05150",
            "Mistral 7B: a window of 4096": MISTRAL,
            "Gemma 2: every other layer, a window of 4096": GEMMA_2,
            "gpt-oss: every other layer, a window of 128": GPT_OSS,
        },
        attention_class=variants.SlidingWindow,
        base_classes=(variants.Masked,),
        options={"d_k": 4, "size": 3},
        worked_rows=(0, 4),
    ),
    Mechanism(
        name="block_sparse",
        title="Block-sparse, global tokens",
        problem="Hardware is faster with whole blocks than with scattered cells, and a long text needs some "
        "tokens that see all of it. Each token attends to its own block; a few global tokens attend to "
        "everything, and everything attends to them.",
        changes="the mask: blocks and global tokens",
        formula="score(i, j) = −∞ unless block(i) = block(j), or i or j is global",
        latex=r"S_{ij} = -\infty \quad \text{unless } \lfloor i/b \rfloor = \lfloor j/b \rfloor "
        r"\text{ or } i \in G \text{ or } j \in G",
        setting='Blocks of two tokens, and "mat" is global: its row and its column are full.',
        sources={
            "Sparse Transformer: block-sparse kernels": "Child et al. 2019, arXiv 1904.10509",
            "Longformer: global tokens in addition to the window": "Beltagy et al. 2020, arXiv 2004.05150",
            "BigBird: window, global and random blocks": "Zaheer et al. 2020, arXiv 2007.14062",
        },
        attention_class=variants.BlockSparse,
        base_classes=(variants.Masked,),
        options={"d_k": 4, "block_size": 2, "global_tokens": (4,)},
    ),
    Mechanism(
        name="flash",
        title="Flash (tiled)",
        problem="Writing the table of weights to memory and reading it back takes longer than computing it. Flash "
        "attention processes the keys in tiles, keeps running sums, and rescales them when a larger score "
        "turns up. The table is never written. Up to rounding, the result equals plain attention.",
        changes="the order of the sums, no number",
        formula="max′ = max(max, tile),  rescale = exp(max − max′)\n"
        "sum′ = sum · rescale + Σ exp(score − max′)\n"
        "weighted sum′ = weighted sum · rescale + Σ exp(score − max′) v\n"
        "output = weighted sum / sum",
        latex=r"m' = \max(m, \max_j S_j), \quad \ell' = e^{m - m'} \ell + \sum_j e^{S_j - m'}, \quad "
        r"O' = e^{m - m'} O + \sum_j e^{S_j - m'} v_j",
        setting="Tiles of two keys. In row 0 the largest score is in the first tile. In row 3 it is in the second "
        "tile, so the earlier sums are rescaled.",
        sources={
            "The running sum and maximum of a softmax": "Milakov & Gimelshein 2018, arXiv 1805.02867",
            "FlashAttention": "Dao et al. 2022, arXiv 2205.14135",
            "F.scaled_dot_product_attention": "PyTorch 2.0, 2023",
        },
        attention_class=variants.Flash,
        options={"d_k": 4, "tile_size": 2},
        worked_rows=(0, 3),
    ),
    Mechanism(
        name="kv_cache",
        title="KV cache",
        problem="To generate one more token, a model would compute the keys and values of all earlier tokens "
        "again. Under a causal mask they do not change, so they are cached, and a step costs one row. The "
        "numbers are those of causal attention.",
        changes="a cache between calls, no number",
        formula="K ← [K, kᵢ],  V ← [V, vᵢ]\noutput(i) = attention(qᵢ, K, V)",
        latex=r"K \leftarrow [K;\, k_i], \quad V \leftarrow [V;\, v_i], \qquad "
        r"O_i = \operatorname{attention}(q_i, K, V)",
        setting="One call per token. In row 0 the cache is empty, so row 4 is worked out too.",
        sources={
            "Every causal model that generates text; its costs": "Pope et al. 2022, arXiv 2211.05102",
            "vLLM: the cache in pages": "Kwon et al. 2023, arXiv 2309.06180",
        },
        attention_class=variants.Cached,
        options={"d_k": 4},
        worked_rows=(0, 4),
        run_example=run_token_by_token,
    ),
    Mechanism(
        name="sink_softcap",
        title="Sinks and softcap",
        problem="A softmax row always sums to 1, even if no key is relevant, and one huge score can take all of "
        "it. A sink is a score without a key that takes the share no key should get. A soft cap limits "
        "the scores.",
        changes="scores capped, a share for the sink",
        formula="score ← cap · tanh(score / cap)\nweight(i, j) = exp(score) / (exp(sink) + Σ exp(score))",
        latex=r"S \leftarrow c \tanh(S / c), \qquad A_{ij} = \frac{e^{S_{ij}}}{e^{s} + \sum_m e^{S_{im}}}",
        setting="A cap of 2 and a sink of 0 (a model would learn the sink): the rows sum to less than 1.",
        sources={
            "Observed: models use the first token as a sink": "Xiao et al. 2023, arXiv 2309.17453",
            "gpt-oss: a learned sink for each head": GPT_OSS,
            "Gemma 2: a cap of 50 on attention scores": GEMMA_2,
        },
        attention_class=variants.SinkAndSoftcap,
        base_classes=(variants.Softcap, variants.Sink),
        options={"d_k": 4, "sink": 0.0, "cap": 2.0},
    ),
)


@dataclass(frozen=True, eq=False)
class NamedVariant:
    """A published variant of attention.

    Attributes:
        name: The name it is known by.
        year: The year of the first version of the paper.
        source: The authors and the paper.
        mechanism: The name of the mechanism in `MECHANISMS` that it belongs to.
        compute_weights: A function that returns its weights on the example, over the five tokens.

    >>> from regard.learn import family
    >>> longformer = family.NAMED_VARIANTS["Longformer"]
    >>> longformer.mechanism, longformer.compute_weights().shape
    ('block_sparse', (5, 5))
    """

    name: str
    year: int
    source: str
    mechanism: str
    compute_weights: Callable[[], Floats]


def _masked(mask: Mask) -> Callable[[], Floats]:
    return lambda: np.asarray(attention(cat.Q, cat.K, mask=mask).to_dense())


def _run(name: str) -> Callable[[], Floats]:
    """Return a function that runs a mechanism and averages the weights over its heads."""
    (mechanism,) = (it for it in MECHANISMS if it.name == name)
    return lambda: np.atleast_3d(mechanism.run()[1].T).mean(axis=-1).T


def _linformer() -> Floats:
    """Attend to two pooled keys instead of five; spread each weight over the tokens that were pooled."""
    pool = np.array([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]) / np.array([[2], [3]])
    return np.asarray(attention(cat.Q, pool @ cat.K).to_dense() @ pool)


def _performer() -> Floats:
    return np.asarray(linear_attention(cat.Q, cat.K, feature_map=random_features(4096)).to_dense())


def _reformer() -> Floats:
    """Attend within buckets of tokens that a random direction hashes alike."""
    bucket = (cat.K @ np.random.default_rng(0).normal(size=4) > 0).astype(int)
    return np.asarray(attention(cat.Q, cat.K, mask=document(bucket)).to_dense())


def _ring() -> Floats:
    """Attend to the keys shard by shard, and merge by the lse; one-hot rows as values make the output the weights."""
    shards = [attention(cat.Q, cat.K[part]) for part in (slice(0, 3), slice(3, 5))]
    values = [np.eye(5)[:3], np.eye(5)[3:]]
    parts = [(A @ value, A.lse) for A, value in zip(shards, values, strict=True)]
    return np.asarray(merge(parts)[0])


_NEIGHBOURS = sliding_window(left=1, right=1)
_RANDOM_PAIRS = dense(np.random.default_rng(59).random((5, 5)) < 0.15)
_STRIDED = causal() & (document([0, 0, 1, 1, 2]) | between(keys=[1, 3]))
_VARIANTS = (
    NamedVariant(
        "Local attention", 2015, "Luong et al., arXiv 1508.04025", "sliding_window", _masked(_NEIGHBOURS)
    ),
    NamedVariant("Transformer-XL", 2019, "Dai et al., arXiv 1901.02860", "kv_cache", _run("kv_cache")),
    NamedVariant(
        "Sparse Transformer", 2019, "Child et al., arXiv 1904.10509", "block_sparse", _masked(_STRIDED)
    ),
    NamedVariant("Multi-query", 2019, "Shazeer, arXiv 1911.02150", "multi_query", _run("multi_query")),
    NamedVariant("Reformer", 2020, "Kitaev et al., arXiv 2001.04451", "block_sparse", _reformer),
    NamedVariant(
        "Longformer",
        2020,
        "Beltagy et al., arXiv 2004.05150",
        "block_sparse",
        _masked(_NEIGHBOURS | first(1) | between(queries=[0])),
    ),
    NamedVariant("Linformer", 2020, "Wang et al., arXiv 2006.04768", "cross", _linformer),
    NamedVariant(
        "Linear Transformer", 2020, "Katharopoulos et al., arXiv 2006.16236", "linear", _run("linear")
    ),
    NamedVariant(
        "BigBird",
        2020,
        "Zaheer et al., arXiv 2007.14062",
        "block_sparse",
        _masked(_NEIGHBOURS | first(1) | between(queries=[0]) | _RANDOM_PAIRS),
    ),
    NamedVariant("Performer", 2020, "Choromanski et al., arXiv 2009.14794", "linear", _performer),
    NamedVariant("FlashAttention", 2022, "Dao et al., arXiv 2205.14135", "flash", _run("flash")),
    NamedVariant(
        "Grouped-query", 2023, "Ainslie et al., arXiv 2305.13245", "grouped_query", _run("grouped_query")
    ),
    NamedVariant("PagedAttention", 2023, "Kwon et al., arXiv 2309.06180", "kv_cache", _run("kv_cache")),
    NamedVariant(
        "StreamingLLM",
        2023,
        "Xiao et al., arXiv 2309.17453",
        "sliding_window",
        _masked(sliding_window(2) | (first(1) & causal())),
    ),
    NamedVariant("Ring Attention", 2023, "Liu et al., arXiv 2310.01889", "flash", _ring),
)
# The variants by name, in the order of their papers.
NAMED_VARIANTS: dict[str, NamedVariant] = {variant.name: variant for variant in _VARIANTS}


@dataclass(frozen=True, eq=False, repr=False)
class NamedTable:
    """The named variants with the section of each, how much weight it moves, and the row of "mat"; prints as a table.

    The column "moved" is the share of the weight, in the mean of the rows, that is on another token than in plain
    attention.

    >>> from regard.learn import family
    >>> len(family.tabulate_named_variants().rows)
    15
    """

    rows: tuple[tuple[NamedVariant, Floats], ...]

    def __str__(self) -> str:
        plain = attention(cat.Q, cat.K).to_dense()
        numbers = {mechanism.name: number for number, mechanism in enumerate(MECHANISMS, start=1)}
        cells = [
            [
                variant.name,
                f"{variant.year}",
                f"{numbers[variant.mechanism]}",
                f"{np.abs(weights - plain).sum() / 2 / len(plain):.2f}",
                *(f"{weight:.2f}" for weight in weights[-1]),
            ]
            for variant, weights in self.rows
        ]
        align = ["left", "right", "right", "right"] + ["right"] * len(cat.tokens)
        headings = ["name", "year", "section", "moved", *cat.tokens]
        return format_table(cells, headings, align=align)  # type: ignore[arg-type]

    __repr__ = __str__


def tabulate_named_variants() -> NamedTable:
    """Run the named variants on the example, and tabulate the weights that "mat" gives to each token.

    Returns:
        The table; `print` it to read it.

    >>> print(str(tabulate_named_variants()).splitlines()[10])
    Performer  ...
    """
    return NamedTable(tuple((variant, variant.compute_weights()) for variant in _VARIANTS))
