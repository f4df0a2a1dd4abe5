"""Studies: many models trained and measured alike, one table and a report of what was found.

python -m jhybrid.study --plan configs/studies/mini.py --workdir DIR
"""
