"""The .proto files, their generated stubs, and the script that generates them."""
