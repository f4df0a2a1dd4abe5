"""RULER (arXiv 2404.06654) from NVIDIA's rules, at any length and for any number of samples.

`suite` names the thirteen tasks, `generation` makes and keeps their samples, `scoring` judges
predictions. Samples follow the same distributions as NVIDIA's generators (NVIDIA/RULER, commit
c3f5e3b), including their fixed orders, but not the same random streams: sample i has a stream of
its own, so that sets can be resumed and never loop.
"""
