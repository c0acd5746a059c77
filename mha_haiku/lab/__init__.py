"""Analysis of heads: what they do and which ones matter; models with known circuits."""
