"""The operators of a hybrid network, the flat program that lists them and the step contract that feeds them."""
