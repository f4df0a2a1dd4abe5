"""Small GGUF files written by hand, and their dequantisation one number at a time."""

import struct

import numpy as np

F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8
LAYOUT = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q8_0: (32, 34)}


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(item) -> bytes:
    """A metadata value with its type before it."""
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item[0], str):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
    return struct.pack(f"<IIQ{len(item)}I", 9, 4, len(item), *item)


def file_bytes(metadata: dict, tensors: dict) -> bytes:
    """tensors: name -> (shape as [out, in], type, raw bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, item in metadata.items():
        head += string(key) + value(item)
    offset, data = 0, b""
    for name, (shape, kind, raw) in tensors.items():
        sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += string(name) + struct.pack("<I", len(shape)) + sizes
        head += struct.pack("<IQ", kind, offset)
        data += raw + b"\0" * (-len(raw) % 32)
        offset = len(data)
    return head + b"\0" * (-len(head) % 32) + data


def random_tensor(random, shape, kind, scale=1.0, centre=0.0):
    """Random raw bytes whose values are about `centre` +- `scale`."""
    count = int(np.prod(shape))
    if kind in (F32, F16):
        values = centre + scale * random.standard_normal(count)
        return shape, kind, values.astype("<f4" if kind == F32 else "<f2").tobytes()
    raw = b""
    for _ in range(count // 32):
        step = scale * (0.5 + random.random_sample()) / (64 if kind == Q8_0 else 5)
        raw += np.float16(step).tobytes()
        if kind == Q4_1:
            raw += np.float16(-8 * step).tobytes()
        raw += random.bytes(LAYOUT[kind][1] - len(raw) % LAYOUT[kind][1])
    return shape, kind, raw


def dequantised(tensor) -> np.ndarray:
    shape, kind, raw = tensor
    if kind in (F32, F16):
        return np.frombuffer(raw, "<f4" if kind == F32 else "<f2").astype("f4").reshape(shape)
    values = []
    size = LAYOUT[kind][1]
    for start in range(0, len(raw), size):
        block = raw[start : start + size]
        d = np.float32(np.frombuffer(block[:2], "<f2")[0])
        m = np.float32(np.frombuffer(block[2:4], "<f2")[0])
        for i in range(32):
            if kind == Q8_0:
                values.append(d * np.float32(np.int8(block[2 + i] - 256 * (block[2 + i] > 127))))
                continue
            packed = block[(4 if kind == Q4_1 else 2) + i % 16]
            q = np.float32(packed % 16 if i < 16 else packed // 16)
            values.append(d * q + m if kind == Q4_1 else d * (q - np.float32(8)))
    return np.array(values, np.float32).reshape(shape)


HEADS, KV_HEADS, DIM, WIDTH, DEPTH, HEAD = 4, 2, 64, 96, 2, 16
VOCAB = [
    "<|endoftext|>",
    "<|im_end|>",
    *dict.fromkeys([chr(33 + i) for i in range(90)] + ["Ġ", "Ċ"]),
]
VOCAB += ["ab", "Ġab"]
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": DEPTH,
    "llama.context_length": 512,
    "llama.embedding_length": DIM,
    "llama.feed_forward_length": WIDTH,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 500.0,
    "llama.rope.dimension_count": HEAD,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": VOCAB,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(VOCAB) - 2),
    "tokenizer.ggml.merges": ["a b", "Ġ ab"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{{ messages }}",
}


def llama(kind: int = Q4_0, tied: bool = True) -> dict:
    """The tensors of a small Llama whose matrices are stored as `kind`."""
    random = np.random.RandomState(0)
    kv, scale = KV_HEADS * HEAD, 1.5 / DIM**0.5

    def norm():
        return random_tensor(random, (DIM,), F32, 0.2, 1.0)

    def matrix(out, into):
        return random_tensor(random, (out, into), kind, scale)

    found = {"token_embd.weight": random_tensor(random, (len(VOCAB), DIM), Q8_0)}
    for i in range(DEPTH):
        found |= {
            f"blk.{i}.attn_norm.weight": norm(),
            f"blk.{i}.attn_q.weight": matrix(HEADS * HEAD, DIM),
            f"blk.{i}.attn_k.weight": matrix(kv, DIM),
            f"blk.{i}.attn_v.weight": matrix(kv, DIM),
            f"blk.{i}.attn_output.weight": matrix(DIM, HEADS * HEAD),
            f"blk.{i}.ffn_norm.weight": norm(),
            f"blk.{i}.ffn_gate.weight": matrix(WIDTH, DIM),
            f"blk.{i}.ffn_up.weight": matrix(WIDTH, DIM),
            f"blk.{i}.ffn_down.weight": matrix(DIM, WIDTH),
        }
    found["output_norm.weight"] = norm()
    if not tied:
        found["output.weight"] = matrix(len(VOCAB), DIM)
    return found
