# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The kernels in plain torch: what every Triton kernel must equal, and what runs where there is no Triton.

Shape letters: B rows of the batch, K proposed tokens of a round, V vocabulary entries, R independent rows of scores.
Scores are log-probabilities up to a constant of their row; `-inf` is a token that cannot be drawn.
"""

import math

import torch


# --- keyed noise ------------------------------------------------------------------------------------------------------
#
# Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a counter of
# four 32-bit words and a key of two into four 32-bit words. Here
#     key     = (low half of the seed, high half of the seed)
#     counter = (block, position, row, stream)
# and the four words of a block serve four tokens. In every run of 1,024 tokens the 256 blocks give their first word to
# the first 256 tokens, their second to the next 256 and so on, so that torch and a GPU both read and write whole
# stretches of memory. A token's noise does not depend on the size of the vocabulary.
#
# A word becomes a uniform of 23 bits, u = (word // 2^9 + 1/2) / 2^23: exact in float32 and never 0 or 1.

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
TOKENS_PER_RUN = 1024
BLOCKS_PER_RUN = TOKENS_PER_RUN // 4
STREAM_COUPLED = 0  # noise that draft and verifier share
STREAM_RESIDUAL = 1  # noise of rejection verification, which no draft ever sees
_WORD = 0xFFFFFFFF
_CACHED_WORDS = 32768


def philox_4x32(counter, key):
    """Philox 4x32-10 on int64 tensors.

    Args:
        counter (`tuple` of 4 `torch.Tensor`): int64 words in [0, 2^32), of shapes that broadcast together.
        key (`tuple` of 2 `int` or `torch.Tensor`): int64 words in [0, 2^32).

    Returns:
        `tuple` of 4 `torch.Tensor`: int64; the low 32 bits are the output words, the rest is to be ignored.
    """
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for round_index in range(PHILOX_ROUNDS):
        # An int64 product wraps, but its bits are those of the unsigned one: the arithmetic shift brings copies of the
        # top bit along, and the mask drops them.
        product_0 = word_0 * PHILOX_MULTIPLIERS[0]
        product_1 = word_2 * PHILOX_MULTIPLIERS[1]
        word_0, word_2 = product_1 >> 32, product_0 >> 32
        if round_index < 2:  # words of rows and words of blocks still meet here: the result is larger than either
            word_0, word_2 = word_0 ^ word_1 ^ key_0, word_2 ^ word_3 ^ key_1
        else:
            word_0.bitwise_xor_(word_1).bitwise_xor_(key_0)
            word_2.bitwise_xor_(word_3).bitwise_xor_(key_1)
        word_0.bitwise_and_(_WORD)
        word_2.bitwise_and_(_WORD)
        word_1, word_3 = product_1, product_0  # their upper halves fall to the mask of the next round
        key_0 = (key_0 + PHILOX_KEY_STEPS[0]) & _WORD
        key_1 = (key_1 + PHILOX_KEY_STEPS[1]) & _WORD
    return word_0, word_1, word_2, word_3


def _uniform(key, rows, positions, vocab_size, stream):
    """[R, V] float32 uniforms for a key of ints or of [R, 1] tensors, and int64 `rows` and `positions` of [R]."""
    count, device = rows.shape[0], rows.device
    runs = -(-vocab_size // TOKENS_PER_RUN)
    lanes, width = min(4, -(-vocab_size // BLOCKS_PER_RUN)), min(vocab_size, BLOCKS_PER_RUN)  # a small V needs no more
    uniforms = torch.empty(count, runs, lanes, width, dtype=torch.float32, device=device)
    rows, positions = (rows & _WORD)[:, None], (positions & _WORD)[:, None]
    stream = torch.full((1, 1), stream, dtype=torch.int64, device=device)
    # A hundred operations run over the same words: on a CPU in pieces that stay in its cache.
    step = max(1, _CACHED_WORDS // (max(count, 1) * width)) if device.type == "cpu" else runs
    for first in range(0, runs, step):
        piece = uniforms[:, first : first + step]
        blocks = torch.arange(first * width, (first + piece.shape[1]) * width, device=device)
        words = philox_4x32((blocks[None, :], positions, rows, stream), key)
        for lane, word in enumerate(words[:lanes]):
            word = (word >> 9).bitwise_and_(0x7FFFFF).expand(count, -1)
            piece[:, :, lane].copy_(word.view(count, piece.shape[1], width))
    return uniforms.add_(0.5).mul_(2.0**-23).flatten(1)[:, :vocab_size]


def split_seed(seed):
    """The two 32-bit words of a seed; a negative seed or one of more than 64 bits is taken modulo 2^64."""
    return seed & _WORD, (seed >> 32) & _WORD


def keyed_uniform(seed, rows, positions, vocab_size):
    """Uniform numbers in (0, 1) that depend on (seed, row, position, token) and on nothing else.

    Args:
        seed (`int`): the key, taken modulo 2^64.
        rows (`torch.Tensor`): [R] int64, index of the sequence in the batch, taken modulo 2^32.
        positions (`torch.Tensor`): [R] int64, absolute position of the token to choose, taken modulo 2^32.
        vocab_size (`int`): V.

    Returns:
        `torch.Tensor`: [R, V] float32 on the device of `rows`, multiples of 2^-24, never 0 or 1.
    """
    return _uniform(split_seed(seed), rows, positions, vocab_size, STREAM_COUPLED)


def keyed_gumbel(seed, rows, positions, vocab_size):
    """Standard Gumbel noise `-log(-log(u))` of `keyed_uniform`, with the same arguments; [R, V] float32."""
    return keyed_uniform(seed, rows, positions, vocab_size).log_().neg_().log_().neg_()


def residual_exponential(seeds, vocab_size):
    """The exponential noise `-log(u)` of the draws of `rejection_verification`: [B] int64 seeds -> [B, V] float32."""
    key = ((seeds & _WORD)[:, None], ((seeds >> 32) & _WORD)[:, None])
    zeros = torch.zeros_like(seeds)
    return _uniform(key, zeros, zeros, vocab_size, STREAM_RESIDUAL).log_().neg_()


# --- verification -----------------------------------------------------------------------------------------------------


def _at_least_float32(scores):
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def _accepted_length(passes, lengths):
    """[B, K] bool and [B] int64 -> [B] int64: how many of the first `lengths[b]` pass before one does not."""
    depths = torch.arange(passes.shape[1], device=passes.device)
    return (passes & (depths < lengths[:, None])).long().cumprod(dim=1).sum(dim=1)


def warp(scores, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What Transformers' warpers of these names leave of scores, one after the other.

    Args:
        scores (`torch.Tensor`): [..., V].
        temperature (`float`, *optional*, defaults to 1.0): divides the scores; > 0.
        top_k (`int`, *optional*, defaults to 0): keeps the k largest of a row and all that equal the last of them; 0
            keeps all.
        top_p (`float`, *optional*, defaults to 1.0): removes the smallest as long as their probabilities add up to no
            more than `1 - top_p`; among equal ones the lower token ids go first.
        min_p (`float`, *optional*, defaults to 0.0): removes what is less likely than `min_p` times the likeliest.

    Returns:
        `torch.Tensor`: [..., V], `-inf` where a token was removed; the likeliest token always stays.
    """
    scores = _at_least_float32(scores)
    if temperature != 1.0:
        scores = scores / temperature
    if top_k > 0:
        last = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < last, -torch.inf)
    if top_p < 1:
        rising, order = scores.sort(dim=-1, stable=True)
        removed = rising.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        removed[..., -1] = False
        scores = scores.masked_fill(torch.zeros_like(removed).scatter_(-1, order, removed), -torch.inf)
    if min_p > 0:
        probability = scores.softmax(dim=-1)
        scores = scores.masked_fill(probability < min_p * probability.amax(dim=-1, keepdim=True), -torch.inf)
    return scores


def coupled_verification(
    scores, proposals, lengths, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, rows=None,
    positions=None, noise=None,
):  # fmt: skip
    """Choose every token by the noised argmax and count the proposals that equal the choice.

    The Gumbel-max rule makes each choice an exact sample of `softmax(warp(scores))`, and a function of the scores and
    the noise alone: no proposal can change a token (Daliri, Musco, Suresh, "Coupling without Communication and
    Drafter-Invariant Speculative Decoding", arXiv 2408.07978). Without noise it is greedy decoding. Ties go to the
    lowest token id.

    Args:
        scores (`torch.Tensor`): [B, K+1, V], the target's scores; row j is the distribution of the token after j
            proposals.
        proposals (`torch.Tensor`): [B, K] int64, the draft's tokens; K may be 0.
        lengths (`torch.Tensor`): [B] int64 in 0..K, how many proposals of a row count; 0 for a finished row.
        temperature, top_k, top_p, min_p (*optional*): as in `warp`, which is applied before the noise is added. A
            kernel sums in another order: a token within rounding of the end of `top_p` may fall on either side.
        seed (`int`, *optional*): seed of `keyed_gumbel`. Greedy when neither `seed` nor `noise` is given.
        rows (`torch.Tensor`, *optional*): [B] int64, needed with `seed`: the rows' indices in the noise.
        positions (`torch.Tensor`, *optional*): [B] int64, needed with `seed`: absolute position of `scores[:, 0]`.
        noise (`torch.Tensor`, *optional*): [B, K+1, V] float32, precomputed in place of `seed`; the same numbers.

    Returns:
        `tuple`: `accepted` [B] int64; `next_token` [B] int64, the choice at row `accepted`; `choices` [B, K+1] int64.
    """
    batch, count, vocab_size = scores.shape
    if seed is not None:
        steps = torch.arange(count, device=scores.device)
        noise = keyed_gumbel(
            seed, rows.repeat_interleave(count), (positions[:, None] + steps).view(-1), vocab_size
        ).view(batch, count, vocab_size)
    if noise is not None or top_k > 0 or top_p < 1 or min_p > 0:
        scores = warp(scores, temperature, top_k, top_p, min_p)
    if noise is not None:
        scores = scores + noise
    choices = scores.argmax(dim=-1)
    accepted = _accepted_length(choices[:, :-1] == proposals, lengths)
    return accepted, choices.gather(1, accepted[:, None])[:, 0], choices


def rejection_verification(
    target_scores, draft_scores, proposals, lengths, *, point_mass, uniforms, residual_seeds, temperature=1.0, top_k=0,
    top_p=1.0, min_p=0.0,
):  # fmt: skip
    """Speculative sampling: accept by the ratio of target to draft, then draw the residual.

    With p = softmax(warp(target_scores)) and q = softmax(draft_scores), proposal s at depth j is accepted iff `u q(s) <
    p(s)`, so a token of p = 0 never is, whatever u (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
    2302.01318). At the first rejection the next token is drawn from (p - q)+ normalised, or from p where that is zero
    everywhere; after `lengths[b]` acceptances from p at that depth. A point mass is a proposal without a q: it is
    accepted iff `u < p(s)`, and its residual is p without s.

    The draw is an exponential race, the argmax of (p - q)+ / e with e = `residual_exponential(residual_seeds)`: it
    needs no sum over the residual, so the same inputs give the same token whatever computes them, in whatever order.
    Ties go to the lowest token id.

    Args:
        target_scores (`torch.Tensor`): [B, K+1, V], the target's scores, processed but for what `warp` does here.
        draft_scores (`torch.Tensor`, *optional*): [B, K, V], scores of the q that each proposal was really drawn from;
            ignored at point masses and beyond `lengths`. May be `None` where every row is a point mass, or K is 0.
        proposals (`torch.Tensor`): [B, K] int64.
        lengths (`torch.Tensor`): [B] int64 in 0..K.
        point_mass (`torch.Tensor`): [B] bool, rows whose proposals have no known q.
        uniforms (`torch.Tensor`): [B, K] float32 in [0, 1), independent of everything the draft has seen.
        residual_seeds (`torch.Tensor`): [B] int64, fresh ones every round, independent likewise: any of the 2^64
            values, for example `torch.randint(2**63 - 1, (B,), generator=generator)`.
        temperature, top_k, top_p, min_p (*optional*): as in `warp`; see `coupled_verification` on the end of `top_p`.

    Returns:
        `tuple`: `accepted` [B] int64 and `next_token` [B] int64.
    """
    batch, count, vocab_size = target_scores.shape
    target_scores = warp(target_scores, temperature, top_k, top_p, min_p)
    depth = count - 1
    every_row = torch.arange(batch, device=target_scores.device)
    log_sum_p = _log_sum(target_scores)
    probability = (_gather_scores(target_scores[:, :depth], proposals) - log_sum_p[:, :depth]).exp()
    if draft_scores is None:
        draft_probability = 1.0
    else:
        log_sum_q = _log_sum(draft_scores)
        draft_probability = (_gather_scores(draft_scores, proposals) - log_sum_q).exp()
        draft_probability = torch.where(point_mass[:, None], 1.0, draft_probability)
    accepted = _accepted_length(uniforms * draft_probability < probability, lengths)

    # From here on one row counts: the first rejected one, or the one after the last accepted proposal.
    p = (_at_least_float32(target_scores[every_row, accepted]) - log_sum_p[every_row, accepted][:, None]).exp_()
    weights = p
    if depth > 0:
        last = accepted.clamp(max=depth - 1)
        q = torch.zeros_like(p).scatter_(1, proposals[every_row, last][:, None], 1.0)
        if draft_scores is not None:
            draft_q = (_at_least_float32(draft_scores[every_row, last]) - log_sum_q[every_row, last][:, None]).exp_()
            q = torch.where(point_mass[:, None], q, draft_q)
        residual = (p - q).clamp_(min=0)
        use_residual = (accepted < lengths)[:, None] & (residual.amax(dim=1, keepdim=True) > 0)
        weights = torch.where(use_residual, residual, p)
    return accepted, (weights / residual_exponential(residual_seeds, vocab_size)).argmax(dim=-1)


def _log_sum(scores):
    """Log of the sum of exponentials over the last dimension; 0 for a row of -inf alone, so that nothing turns NaN."""
    total = _at_least_float32(scores).logsumexp(dim=-1)
    return torch.where(total == -torch.inf, 0.0, total)


def _gather_scores(scores, tokens):
    return _at_least_float32(scores.gather(-1, tokens[..., None])[..., 0])


# --- forks, cache bias, feedback --------------------------------------------------------------------------------------


def top_k(scores, k):
    """The k largest of each row of [R, V], falling, equal ones by rising index: values and int64 indices [R, k]."""
    if scores.device.type != "cpu":  # a device sorts fast, and looking for ties would wait for it
        values, indices = scores.sort(dim=-1, descending=True, stable=True)
        return values[:, :k], indices[:, :k]
    taken = min(k + 1, scores.shape[1])
    values, indices = scores.topk(taken, dim=-1)
    indices, order = indices.sort(dim=-1)
    values, order_by_value = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    indices = indices.gather(1, order_by_value)
    if taken > k > 0:  # topk keeps any of the entries that tie for the last place: take the first of them
        for row in (values[:, k - 1] == values[:, k]).nonzero()[:, 0].tolist():
            last = values[row, k - 1]
            above = int((values[row] > last).sum())
            indices[row, above:k] = (scores[row] == last).nonzero()[: k - above, 0]
    return values[:, :k], indices[:, :k]


def select_forks(scores, sent, lengths, fan_out):
    """The tokens to prepare answers for, at every accept length (the speculation cache's forks, SSD section 4.1).

    At depth k < lengths[b] the token that was sent cannot be the outcome and is excluded; at depth lengths[b], where
    everything was accepted, nothing is. Scores are the draft's at each depth, noised where verification is coupled.

    Args:
        scores (`torch.Tensor`): [B, K+1, V].
        sent (`torch.Tensor`): [B, K] int64, the chain being verified.
        lengths (`torch.Tensor`): [B] int64 in 0..K, its length.
        fan_out (`list[int]`): K+1 counts, forks at each depth.

    Returns:
        `torch.Tensor`: [B, sum(fan_out)] int64, depth after depth, the best first and ties by the lowest token id. -1
        is an empty place: beyond `lengths[b]`, or where fewer than `fan_out[k]` tokens have a score above -inf.
    """
    batch, count, vocab_size = scores.shape
    widest = max(fan_out)
    if widest == 0:
        return torch.empty((batch, 0), dtype=torch.int64, device=scores.device)
    # One candidate more than needed makes room for the excluded one, and the scores need no masked copy.
    taken = min(widest + 1, vocab_size)
    values, tokens = (t.view(batch, count, taken) for t in top_k(scores.reshape(batch * count, vocab_size), taken))
    depths = torch.arange(count, device=scores.device)
    excluded = torch.nn.functional.pad(sent, (0, 1), value=-1).masked_fill(depths >= lengths[:, None], -1)
    drop = tokens == excluded[:, :, None]
    empty = (values == -torch.inf) | (depths > lengths[:, None])[:, :, None]
    order = drop.long().sort(dim=-1, stable=True).indices  # the excluded token, wherever it stands, goes last
    tokens = tokens.masked_fill(drop | empty, -1).gather(2, order)
    tokens = torch.nn.functional.pad(tokens, (0, widest + 1 - taken), value=-1)
    return torch.cat([tokens[:, depth, :width] for depth, width in enumerate(fan_out)], dim=1)


def biased_draw(scores, fan_out, bias, noise):
    """Saguaro sampling (SSD section 4.2, Definition 14): a draw that leaves the cached tokens to the residual.

    The `fan_out` most likely tokens of each row have their probability multiplied by `bias`; the whole is renormalised
    to q and the token is drawn from q. q is handed out because verification must test against this very q.

    Args:
        scores (`torch.Tensor`): [R, V], the draft's scores, temperature and filters applied.
        fan_out (`int`): how many tokens are biased; >= 0.
        bias (`float`): C in (0, 1].
        noise (`torch.Tensor`): [R, V] float32 standard Gumbel noise.

    Returns:
        `tuple`: `tokens` [R] int64, `log_q` [R, V] float32, `log_q_token` [R] float32. Ties go to the lowest token id,
        in the draw and in the choice of the biased tokens.
    """
    scores = _at_least_float32(scores)
    if fan_out > 0 and bias < 1.0:
        values, indices = top_k(scores, min(fan_out, scores.shape[1]))
        scores = scores.scatter(1, indices, values + math.log(bias))
    log_q = (scores - _log_sum(scores)[:, None]).float()
    tokens = (log_q + noise).argmax(dim=-1)
    return tokens, log_q, log_q.gather(1, tokens[:, None])[:, 0]


def top_k_with_residual(scores, k):
    """The k largest log-probabilities of each row, and the log of all the mass beside them.

    Args:
        scores (`torch.Tensor`): [R, V].
        k (`int`): 1..V.

    Returns:
        `tuple`: `log_probs` [R, k] float32 in falling order, `token_ids` [R, k] int64 (ties by the lowest id),
        `log_residual` [R] float32, which is `-inf` where nothing is left. The residual is summed, not taken as one
        minus the rest, so a small one keeps its digits.
    """
    values, indices = top_k(scores, k)
    total = _log_sum(scores)
    residual = _at_least_float32(scores.scatter(1, indices, -torch.inf)).logsumexp(dim=-1)
    return (_at_least_float32(values) - total[:, None]).float(), indices, (residual - total).float()


# --- cache slots ------------------------------------------------------------------------------------------------------


def commit_slots(keys, values, source, destination, lengths):
    """Move cache slots in place, for all layers: slot `source[b, i]` of row b becomes slot `destination[b, i]`.

    Everything is read before anything is written, so the two may overlap.

    Args:
        keys (`list` of `torch.Tensor`): one [B, H, S, D] per layer; heads, slots and widths may differ between layers.
        values (`list` of `torch.Tensor`): the same for the values.
        source (`torch.Tensor`): [B, n] int64 slot numbers.
        destination (`torch.Tensor`): [B, n] int64 slot numbers, different from each other within a row.
        lengths (`torch.Tensor`): [B] int64 in 0..n, how many moves of a row count.
    """
    moves = torch.arange(source.shape[1], device=source.device) < lengths[:, None]
    batch_index, move_index = moves.nonzero(as_tuple=True)
    source, destination = source[batch_index, move_index], destination[batch_index, move_index]
    for cache in (*keys, *values):
        # Indexing with tensors around a slice puts the indexed dimension first: [moves, H, D].
        cache[batch_index, :, destination] = cache[batch_index, :, source]
