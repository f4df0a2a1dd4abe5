"""A second, independent statement of the gated delta rule: numpy, float64, one Python loop."""

import numpy as np


def gated_delta_rule(
    q, k, v, g, beta, *, initial_state, write_mask=None, segment_ids=None, scale=None, chunk_size=64
):
    """Per row and head, with the rank-one erase written out as a matrix."""
    q, k, v, g, beta, initial_state = (
        np.asarray(x, np.float64) for x in (q, k, v, g, beta, initial_state)
    )
    B, T, H, V = v.shape
    K = q.shape[-1]
    scale = K**-0.5 if scale is None else scale
    o, final = np.zeros((B, T, H, V)), np.zeros((B, H, K, V))
    for b in range(B):
        for h in range(H):
            kv_head = h // (H // q.shape[2])
            state = initial_state[b, h]
            at_chunk_start = state  # decayed along, without the chunk's writes
            for t in range(T):
                if t and segment_ids is not None and segment_ids[b, t] != segment_ids[b, t - 1]:
                    state, at_chunk_start = np.zeros((K, V)), np.zeros((K, V))
                key, query = k[b, t, kv_head], q[b, t, kv_head]
                decay = np.exp(g[b, t, h])
                erase = np.eye(K) - beta[b, t, h] * np.outer(key, key)
                state = erase @ (decay * state) + beta[b, t, h] * np.outer(key, v[b, t, h])
                at_chunk_start = decay * at_chunk_start
                o[b, t, h] = scale * query @ state
                if (t + 1) % chunk_size == 0 or t + 1 == T:
                    if write_mask is not None:
                        weight = float(write_mask[b, t // chunk_size, h])
                        state = (1 - weight) * at_chunk_start + weight * state
                    at_chunk_start = state
            final[b, h] = state
    return o, final


def linear_attention(
    q,
    k,
    v,
    g,
    *,
    initial_state,
    beta=None,
    bonus=None,
    write_mask=None,
    segment_ids=None,
    scale=None,
    chunk_size=64,
):
    """Per row and head; g [B, T, H] or, one per key channel, [B, T, H, K]."""
    q, k, v, g, initial_state = (np.asarray(x, np.float64) for x in (q, k, v, g, initial_state))
    B, T, H, V = v.shape
    K = q.shape[-1]
    scale = K**-0.5 if scale is None else scale
    o, final = np.zeros((B, T, H, V)), np.zeros((B, H, K, V))
    for b in range(B):
        for h in range(H):
            kv_head = h // (H // q.shape[2])
            state = initial_state[b, h]
            at_chunk_start = state
            for t in range(T):
                if t and segment_ids is not None and segment_ids[b, t] != segment_ids[b, t - 1]:
                    state, at_chunk_start = np.zeros((K, V)), np.zeros((K, V))
                key, query = k[b, t, kv_head], q[b, t, kv_head]
                before, decay = state, np.exp(g[b, t, h]) * np.ones(K)
                write = v[b, t, h]
                if beta is not None:
                    write = float(beta[b, t, h]) * (write - key @ (decay[:, None] * state))
                write = np.outer(key, write)
                state = decay[:, None] * state + write
                at_chunk_start = decay[:, None] * at_chunk_start
                read = state if bonus is None else before + np.float64(bonus[h])[:, None] * write
                o[b, t, h] = scale * query @ read
                if (t + 1) % chunk_size == 0 or t + 1 == T:
                    if write_mask is not None:
                        weight = float(write_mask[b, t // chunk_size, h])
                        state = (1 - weight) * at_chunk_start + weight * state
                    at_chunk_start = state
            final[b, h] = state
    return o, final
