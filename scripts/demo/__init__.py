"""The parts of `train_demo.py`: text, tokenizer, models, training, and the page of each model."""
