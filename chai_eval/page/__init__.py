"""One page that stands by itself: figures, and the HTML around them."""
