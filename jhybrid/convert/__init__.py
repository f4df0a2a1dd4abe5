"""Published checkpoints in and out: Hugging Face folders, flash-linear-attention's and GGUF files.

    python -m jhybrid.convert from-hf DIR OUT    from-fla DIR OUT    from-gguf FILE OUT
    python -m jhybrid.convert to-hf CHECKPOINT OUT           to-fla CHECKPOINT OUT

Imports are exports as `jhybrid.checkpoint` writes them, with the tokenizer inside. Weights are read
from safetensors and GGUF alone: nothing is unpickled, no code of a checkpoint is run.
"""
