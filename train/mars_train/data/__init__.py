"""From files of conversations to a store of tokenised rows."""
