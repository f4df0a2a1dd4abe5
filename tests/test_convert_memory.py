"""What imports and exports cost in memory, measured on a generated checkpoint of 2 GB."""

import json
import pathlib
import subprocess
import sys

import checkpoint_cases
import numpy as np
import pytest

from jhybrid.convert.safetensors_files import SafetensorsFolder

ROOT = pathlib.Path(__file__).parent.parent
# Llama 3.2 1B, with its 128,256 x 2,048 embedding as the largest tensor, cut to 13 layers.
LARGE = checkpoint_cases.LLAMA | {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 13,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
BYTES = 2  # of a bfloat16
MIB = 1 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]


def generate(folder: pathlib.Path, config: dict) -> dict[str, int]:
    """A checkpoint of pseudo-random bytes; the sizes of its tensors."""
    sizes = {name: BYTES * int(np.prod(s)) for name, s in checkpoint_cases.shapes(config).items()}
    header, end = {}, 0
    for name, shape in checkpoint_cases.shapes(config).items():
        offsets = [end, end := end + sizes[name]]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for size in sizes.values():
            file.write(random.bytes(size))
    return sizes


def peak(*arguments: str) -> int:
    """Peak resident bytes of one conversion in a process of its own."""
    code = (
        "import runpy, sys\n"
        "sys.argv[0] = 'convert'\n"
        "try: runpy.run_module('jhybrid.convert', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "print(*[line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line])"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return 1024 * int(run.stdout.splitlines()[-1])


def test_an_import_holds_its_parameters_and_one_tensor_and_the_way_back_one_parameter(tmp_path):
    small = checkpoint_cases.write(
        tmp_path / "small",
        checkpoint_cases.CONFIGS["smollm2"],
        checkpoint_cases.weights(checkpoint_cases.CONFIGS["smollm2"]),
    )
    sizes = generate(tmp_path / "large", LARGE)
    total, largest = sum(sizes.values()), max(sizes.values())
    assert total > 2e9
    program = peak("from-hf", small, tmp_path / "small_out", "--tokenizer", "bytes")
    used = peak("from-hf", tmp_path / "large", tmp_path / "out", "--tokenizer", "bytes") - program
    print(f"parameters {total / MIB:.0f} MiB, largest tensor {largest / MIB:.0f} MiB, ")
    print(f"peak {used / MIB:.0f} MiB above the program's own {program / MIB:.0f} MiB")
    assert total < used <= total + largest
    back = peak("to-hf", tmp_path / "out", tmp_path / "back") - program
    print(f"to-hf: peak {back / MIB:.0f} MiB")
    assert 0 < back <= 3 * largest  # one parameter: as stored, decoded, and as it is written
    theirs, ours = (SafetensorsFolder(tmp_path / name) for name in ("large", "back"))
    assert theirs.tensors == ours.tensors
    for name in theirs.tensors:
        for (_, one), (_, other) in zip(theirs.rows(name), ours.rows(name), strict=True):
            np.testing.assert_array_equal(one.view(np.uint16), other.view(np.uint16))
