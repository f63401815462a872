"""The recipe of the bundled model `tiny`: a little world of text, its tokenizer, its training and its evaluation."""
