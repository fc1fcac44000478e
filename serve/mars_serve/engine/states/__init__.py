"""States of recurrent layers between the steps of an engine, and the operators that run them."""
