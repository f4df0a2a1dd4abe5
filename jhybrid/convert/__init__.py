"""Published checkpoints in and out: Hugging Face folders and GGUF files.

    python -m jhybrid.convert from-hf DIR OUT      from-gguf FILE OUT      to-hf CHECKPOINT OUT

Imports are exports as `jhybrid.checkpoint` writes them, with the tokenizer inside. Weights are read
from safetensors and GGUF alone: nothing is unpickled, no code of a checkpoint is run.
"""
