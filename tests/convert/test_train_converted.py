"""Converted models in train.py and eval.py: started, resumed, scored, and looked into."""
