"""Records from their files to packed batches, chats, tokenizers, and what teachers said of them."""
