"""python -m jhybrid.convert: see the package."""

from pathlib import Path

import jhybrid.convert
from jhybrid.commandline import Parser, run
from jhybrid.convert.fla_folder import from_fla, to_fla
from jhybrid.convert.gguf_llama import from_gguf
from jhybrid.convert.huggingface import from_hf, to_hf


def _main() -> int:
    parser = Parser(prog="python -m jhybrid.convert", description=jhybrid.convert.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    importing = Parser(add_help=False)
    importing.add_argument("--tokenizer", help="instead of the model's own, as data.tokenizer")
    importing.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    folder = commands.add_parser("from-hf", parents=[importing], help="a Hugging Face folder")
    folder.add_argument("folder", type=Path)
    fla = commands.add_parser(
        "from-fla", parents=[importing], help="a folder of flash-linear-attention 0.6.0"
    )
    fla.add_argument("folder", type=Path)
    gguf = commands.add_parser("from-gguf", parents=[importing], help="a GGUF file (Llama)")
    gguf.add_argument("file", type=Path)
    gguf.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    back = commands.add_parser("to-hf", help="an export or a workdir as a Hugging Face folder")
    back.add_argument("checkpoint", type=Path)
    fla_back = commands.add_parser(
        "to-fla", help="an export or a workdir as a folder of flash-linear-attention 0.6.0"
    )
    fla_back.add_argument("checkpoint", type=Path)
    for command in (folder, fla, gguf, back, fla_back):
        command.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.command in ("to-hf", "to-fla"):
        write = to_hf if arguments.command == "to-hf" else to_fla
        written = write(arguments.checkpoint, arguments.out)
    else:
        options = {"tokenizer": arguments.tokenizer, "assignments": arguments.set}
        if arguments.command == "from-hf":
            written = from_hf(arguments.folder, arguments.out, **options)
        elif arguments.command == "from-fla":
            written = from_fla(arguments.folder, arguments.out, **options)
        else:
            written = from_gguf(arguments.file, arguments.out, dtype=arguments.dtype, **options)
    print(f"wrote {written}")
    return 0


if __name__ == "__main__":
    run(_main)
