"""The fifteen mechanisms, in the order of the book: what each is for, its formula, its example and where it is used."""

from __future__ import annotations

import numpy as np

from regard.learn.attention import ScaledDotProductAttention
from regard.learn.examples import Example, cat
from regard.learn.family.heads import GroupedQuery, MultiHead, MultiQuery, pooled
from regard.learn.family.masking import BlockSparse, Causal, Cross, Masked, SlidingWindow
from regard.learn.family.mechanism import Mechanism, Run, Use
from regard.learn.family.scores import ALiBi, Biased, RelativeBias, Rotary, Sink, SinkAndSoftcap, Softcap
from regard.learn.family.streaming import Cached, Flash, Linear

TRANSFORMER = "Vaswani et al. 2017, arXiv 1706.03762"
T5 = "Raffel et al. 2019, arXiv 1910.10683"
GPT_3 = "Brown et al. 2020, arXiv 2005.14165"
MISTRAL = "Jiang et al. 2023, arXiv 2310.06825"
GEMMA_2 = "Gemma Team 2024, arXiv 2408.00118"
GPT_OSS = "OpenAI 2025, arXiv 2508.10925"


def token_by_token(attention: Cached, given: Example) -> Run:
    """One call for each token; a row of weights is filled up with zeros for the keys that were not there yet."""
    weights, outputs = np.zeros((len(given.Q), len(given.K))), []
    for i in range(len(given.Q)):
        output, row = attention(given.Q[i : i + 1], given.K[i : i + 1], given.V[i : i + 1])
        weights[i, : i + 1] = row[0]
        outputs.append(output[0])
    return np.stack(outputs), weights


def shared(num_heads: int, num_kv_heads: int) -> Example:
    """The example with fewer heads of keys and values: each group replaced by its mean."""
    K, V = pooled(cat.K, num_heads, num_kv_heads), pooled(cat.V, num_heads, num_kv_heads)
    return Example(cat.tokens, cat.Q, K, V)


# The fifteen members of the family in the order of the chapter, each with its words, formula, class and example.
MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism(
        name="scaled_dot_product",
        title="Scaled dot product",
        problem="Every token should gather what it needs from all the others at once, and find it by content, "
        "wherever it stands.",
        changes="nothing: the four steps",
        formula="weights = softmax(Q Kᵀ / √d_k)\noutput  = weights V",
        latex=r"A = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_k}}\right), \qquad O = A V",
        setting="One head of four columns; all the others are measured against it.",
        used=(Use("The Transformer, and with changes all that follow here", TRANSFORMER),),
        kind=ScaledDotProductAttention,
        options={"d_k": 4},
    ),
    Mechanism(
        name="multi_head",
        title="Multi-head",
        problem="One row of weights can tell one story: it cannot look at the verb for one reason and at the noun for "
        "another. Several heads look at once, each through columns of its own.",
        changes="columns split before, joined after",
        formula="head h = attention(Qₕ, Kₕ, Vₕ)\noutput = [head 0, head 1, …]",
        latex=r"O_h = \operatorname{attention}(Q_h, K_h, V_h), \qquad O = [\,O_0, O_1, \ldots\,]",
        setting="Two heads of two: columns 0 and 1, columns 2 and 3. A layer projects before and after; here the "
        "columns are taken as they are.",
        used=(
            Use("The Transformer: 8 heads of 64 columns", TRANSFORMER),
            Use("BERT base: 12 heads of 64", "Devlin et al. 2018, arXiv 1810.04805"),
            Use("GPT-3: 96 heads of 128", GPT_3),
        ),
        kind=MultiHead,
        options={"d_k": 2, "num_heads": 2},
    ),
    Mechanism(
        name="causal",
        title="Causal",
        problem="A model that is to predict the next token must not see it. Every query is kept from the keys after "
        "its own, so that all positions of a text can be trained in one pass.",
        changes="the mask: nothing ahead",
        formula="score(i, j) = −∞ where j > i",
        latex=r"S_{ij} = -\infty \quad \text{for } j > i",
        setting="Row 0 sees itself alone, so row 3 is worked out too.",
        used=(
            Use("The Transformer's decoder", TRANSFORMER),
            Use("GPT-2 and what came after it", "Radford et al. 2019, OpenAI report"),
        ),
        kind=Causal,
        also=(Masked,),
        options={"d_k": 4},
        rows=(0, 3),
    ),
    Mechanism(
        name="cross",
        title="Cross",
        problem="A translation must look at the sentence it translates, a picture at the words that describe it. "
        "Queries come from one sequence, keys and values from another.",
        changes="the inputs: two sequences",
        formula="Q from one sequence, K and V from another\nweights are (q_len, kv_len), seldom square",
        latex=r"Q = X W_Q, \quad K = Y W_K, \quad V = Y W_V, \qquad A \in \mathbb{R}^{|X| \times |Y|}",
        setting='The queries of "on" and "mat" look at the keys and values of "The", "cat" and "sat".',
        used=(
            Use("The Transformer: the decoder looks at the encoder", TRANSFORMER),
            Use("T5", T5),
            Use("Whisper: text looks at sound", "Radford et al. 2022, arXiv 2212.04356"),
            Use("Latent diffusion: an image looks at its caption", "Rombach et al. 2021, arXiv 2112.10752"),
        ),
        kind=Cross,
        options={"d_k": 4},
        given=Example(cat.tokens[:3], cat.Q[3:], cat.K[:3], cat.V[:3]),
        looking=cat.tokens[3:],
    ),
    Mechanism(
        name="multi_query",
        title="Multi-query",
        problem="While a text is being written, the keys and values of all tokens so far are read for every new one, "
        "and that reading takes the time. One head of them for all heads of queries makes it far less.",
        changes="one head of keys and values",
        formula="head h = attention(Qₕ, K, V)",
        latex=r"O_h = \operatorname{attention}(Q_h, K, V)",
        setting="Two heads of queries; the one head of keys, and that of values, is the mean of the two there were.",
        used=(
            Use("Proposed for fast decoding", "Shazeer 2019, arXiv 1911.02150"),
            Use("PaLM", "Chowdhery et al. 2022, arXiv 2204.02311"),
            Use("StarCoder", "Li et al. 2023, arXiv 2305.06161"),
        ),
        kind=MultiQuery,
        also=(GroupedQuery,),
        options={"d_k": 2, "num_heads": 2},
        given=shared(num_heads=2, num_kv_heads=1),
    ),
    Mechanism(
        name="grouped_query",
        title="Grouped-query",
        problem="One head of keys for all costs quality, one for each costs memory. Groups of query heads share one: "
        "nearly the quality of many at nearly the cost of one.",
        changes="keys and values shared in groups",
        formula="head h = attention(Qₕ, K_g, V_g),  g = ⌊h · kv_heads / heads⌋",
        latex=r"O_h = \operatorname{attention}(Q_h, K_g, V_g), \qquad g = \lfloor h \, H_{kv} / H \rfloor",
        setting="Four heads of one column, two of keys and values: each is the mean of the two it replaces, and "
        "serves two heads of queries in a row.",
        used=(
            Use(
                "Proposed, with the mean of trained heads to begin from",
                "Ainslie et al. 2023, arXiv 2305.13245",
            ),
            Use("Llama 2 70B: 64 heads, 8 of keys", "Touvron et al. 2023, arXiv 2307.09288"),
            Use("Mistral 7B: 32 heads, 8 of keys", MISTRAL),
        ),
        kind=GroupedQuery,
        options={"d_k": 1, "num_heads": 4, "num_kv_heads": 2},
        given=shared(num_heads=4, num_kv_heads=2),
    ),
    Mechanism(
        name="relative_bias",
        title="Relative position bias (T5)",
        problem="Attention does not see order. A learned number for each distance between query and key is added to "
        "the score; distances that are far off share one, so that a small table serves any length.",
        changes="a bias by bucket of distance",
        formula="score(i, j) = qᵢ·kⱼ / √d_k + table[bucket(j − i)]",
        latex=r"S_{ij} = \frac{q_i \cdot k_j}{\sqrt{d_k}} + b_{\operatorname{bucket}(j - i)}",
        setting="Eight buckets: four for keys behind or level, four for keys ahead; 2 and 3 steps share one. The table "
        "would be learned; here it favours what is near. T5 itself leaves out the division by √d_k.",
        used=(Use("T5: 32 buckets up to a distance of 128, a table for each head", T5),),
        kind=RelativeBias,
        also=(Biased,),
        options={
            "d_k": 4,
            "table": (0.5, 0.25, 0.0, -0.5, 0.0, 0.25, -0.25, -0.75),
            "max_distance": 6,
        },
    ),
    Mechanism(
        name="rotary",
        title="Rotary",
        problem="Positions that are added to vectors mix with their content. Turning queries and keys instead, by an "
        "angle that grows with the position, leaves their lengths alone, and the dot product knows the distance only.",
        changes="Q and K turned by position",
        formula="score(i, j) = R(i)qᵢ · R(j)kⱼ / √d_k = qᵢ · R(j − i)kⱼ / √d_k\n"
        "R(p) turns pair c by the angle p · base^(−2c/d_k)",
        latex=r"S_{ij} = \frac{(R_i q_i) \cdot (R_j k_j)}{\sqrt{d_k}} = \frac{q_i \cdot R_{j-i} k_j}{\sqrt{d_k}}, "
        r"\qquad \theta_c = \text{base}^{-2c/d_k}",
        setting='Entries 0 and 2 are a pair, 1 and 3 another (the convention called "half"; the paper pairs '
        "neighbours). With base 100 a step turns them by 1 and by 0.1; 10 000 is the published base.",
        used=(
            Use("Proposed", "Su et al. 2021, arXiv 2104.09864"),
            Use("GPT-NeoX-20B, on a quarter of the columns", "Black et al. 2022, arXiv 2204.06745"),
            Use("LLaMA and its successors", "Touvron et al. 2023, arXiv 2302.13971"),
        ),
        kind=Rotary,
        options={"d_k": 4, "base": 100.0},
    ),
    Mechanism(
        name="alibi",
        title="ALiBi",
        problem="A model that has learned its positions meets ones it never saw when the text is longer than in "
        "training. A straight line that falls with the distance needs no learning and goes on for ever.",
        changes="a line taken off the scores",
        formula="score(i, j) = qᵢ·kⱼ / √d_k − slope · |i − j|",
        latex=r"S_{ij} = \frac{q_i \cdot k_j}{\sqrt{d_k}} - m \, |i - j|",
        setting="A slope of 1/2, the steepest of eight heads. Published models are causal; here both sides are seen.",
        used=(
            Use("Proposed", "Press et al. 2021, arXiv 2108.12409"),
            Use("BLOOM", "BigScience 2022, arXiv 2211.05100"),
            Use("MPT-7B", "MosaicML 2023, announcement"),
        ),
        kind=ALiBi,
        also=(Biased,),
        options={"d_k": 4, "slope": 0.5},
    ),
    Mechanism(
        name="linear",
        title="Linear (kernel feature map)",
        problem="The table of weights grows with the square of the length. Where a weight is a plain product "
        "φ(q)·φ(k), the sums over the keys can be taken first, and the table need not exist.",
        changes="φ(q)·φ(k) for the exponential",
        formula="weight(i, j) = φ(qᵢ)·φ(kⱼ) / Σₘ φ(qᵢ)·φ(kₘ)\n"
        "output(i) = φ(qᵢ)S / φ(qᵢ)·z,  S = Σ φ(kⱼ)vⱼᵀ,  z = Σ φ(kⱼ)",
        latex=r"O_i = \frac{\phi(q_i)^\top S}{\phi(q_i)^\top z}, \qquad "
        r"S = \sum_j \phi(k_j) v_j^\top, \quad z = \sum_j \phi(k_j)",
        setting="φ(x) = elu(x) + 1, which is x + 1 wherever x is not negative, as here. The weights are far more even "
        "than softmax's: that is the price.",
        used=(
            Use("Proposed, with this φ", "Katharopoulos et al. 2020, arXiv 2006.16236"),
            Use("Performer: random features in place of φ", "Choromanski et al. 2020, arXiv 2009.14794"),
            Use("MiniMax-01: seven layers in eight, without softmax", "MiniMax 2025, arXiv 2501.08313"),
        ),
        kind=Linear,
        options={"d_k": 4},
    ),
    Mechanism(
        name="sliding_window",
        title="Sliding window",
        problem="Most of what a token needs is near. If it sees the last few tokens only, time and memory grow with "
        "the length, not with its square; what is farther off arrives through the layers below.",
        changes="the mask: the last few only",
        formula="score(i, j) = −∞ unless i − size < j ≤ i",
        latex=r"S_{ij} = -\infty \quad \text{unless } i - w < j \le i",
        setting="A window of 3, the query's own place included. Row 0 sees itself alone, so row 4 is worked out too.",
        used=(
            Use("Longformer, to both sides", "Beltagy et al. 2020, arXiv 2004.05150"),
            Use("Mistral 7B: a window of 4096", MISTRAL),
            Use("Gemma 2: every other layer, a window of 4096", GEMMA_2),
            Use("gpt-oss: every other layer, a window of 128", GPT_OSS),
        ),
        kind=SlidingWindow,
        also=(Masked,),
        options={"d_k": 4, "size": 3},
        rows=(0, 4),
    ),
    Mechanism(
        name="block_sparse",
        title="Block-sparse, global tokens",
        problem="Machines like whole blocks better than scattered cells, and a long text still needs someone who knows "
        "all of it. Tokens see their own block, and a few chosen ones see and are seen everywhere.",
        changes="the mask: blocks and a few tokens",
        formula="score(i, j) = −∞ unless block(i) = block(j), or i or j is global",
        latex=r"S_{ij} = -\infty \quad \text{unless } \lfloor i/b \rfloor = \lfloor j/b \rfloor "
        r"\text{ or } i \in G \text{ or } j \in G",
        setting='Blocks of two tokens, and "mat" is global: its row and its column are full.',
        used=(
            Use("Sparse Transformer: block-sparse kernels", "Child et al. 2019, arXiv 1904.10509"),
            Use("Longformer: global tokens beside the window", "Beltagy et al. 2020, arXiv 2004.05150"),
            Use("BigBird: window, global and random blocks", "Zaheer et al. 2020, arXiv 2007.14062"),
        ),
        kind=BlockSparse,
        also=(Masked,),
        options={"d_k": 4, "block": 2, "everywhere": (4,)},
    ),
    Mechanism(
        name="flash",
        title="Flash (tiled)",
        problem="Writing the table of weights to memory and reading it again takes longer than computing it. Keys are "
        "taken a tile at a time, sums are kept and rescaled when a larger score turns up, and the table is never "
        "written. The numbers are the plain ones, up to rounding.",
        changes="the order of the sums, no number",
        formula="shift′ = max(shift, tile),  kept = exp(shift − shift′)\n"
        "sum′    = sum · kept + Σ exp(score − shift′)\n"
        "mixed′  = mixed · kept + Σ exp(score − shift′) v,   output = mixed / sum",
        latex=r"m' = \max(m, \max_j S_j), \quad \ell' = e^{m - m'} \ell + \sum_j e^{S_j - m'}, \quad "
        r"O' = e^{m - m'} O + \sum_j e^{S_j - m'} v_j",
        setting="Tiles of two keys. In row 0 the largest score comes in the first tile; in row 3 it comes in the "
        "second, and what was summed up before is rescaled.",
        used=(
            Use("The running sum and maximum of a softmax", "Milakov & Gimelshein 2018, arXiv 1805.02867"),
            Use("FlashAttention", "Dao et al. 2022, arXiv 2205.14135"),
            Use("F.scaled_dot_product_attention", "PyTorch 2.0, 2023"),
        ),
        kind=Flash,
        options={"d_k": 4, "tile": 2},
        rows=(0, 3),
    ),
    Mechanism(
        name="kv_cache",
        title="KV cache",
        problem="Writing one more token would compute the keys and values of all earlier ones again. They do not "
        "change under a causal mask, so they are kept, and a step costs one row. The numbers are the causal ones.",
        changes="what is kept between calls, no number",
        formula="K ← [K, kᵢ],  V ← [V, vᵢ]\noutput(i) = attention(qᵢ, K, V)",
        latex=r"K \leftarrow [K;\, k_i], \quad V \leftarrow [V;\, v_i], \qquad "
        r"O_i = \operatorname{attention}(q_i, K, V)",
        setting="One call for each token. Row 0 finds the cache empty, so row 4 is worked out too.",
        used=(
            Use("Every causal model that writes text; its costs", "Pope et al. 2022, arXiv 2211.05102"),
            Use("vLLM: the cache in pages", "Kwon et al. 2023, arXiv 2309.06180"),
        ),
        kind=Cached,
        options={"d_k": 4},
        rows=(0, 4),
        attend=token_by_token,
    ),
    Mechanism(
        name="sink_softcap",
        title="Sinks and softcap",
        problem="A softmax must spend its whole row, even where nothing is worth looking at, and one huge score can "
        "take it all. A sink is a score without a key, which takes what nobody deserves; a soft cap holds scores down.",
        changes="scores capped, a share for nobody",
        formula="score ← cap · tanh(score / cap)\nweight(i, j) = exp(score) / (exp(sink) + Σ exp(score))",
        latex=r"S \leftarrow c \tanh(S / c), \qquad A_{ij} = \frac{e^{S_{ij}}}{e^{s} + \sum_m e^{S_{im}}}",
        setting="A cap of 2 and a sink of 0, which a model would learn: the rows sum to less than 1.",
        used=(
            Use("Found: models make a sink of the first token", "Xiao et al. 2023, arXiv 2309.17453"),
            Use("gpt-oss: a learned sink for each head", GPT_OSS),
            Use("Gemma 2: a cap of 50 on attention scores", GEMMA_2),
        ),
        kind=SinkAndSoftcap,
        also=(Softcap, Sink),
        options={"d_k": 4, "sink": 0.0, "cap": 2.0},
    ),
)
