"""A web page on which you drag shapes, and the model points to them."""
