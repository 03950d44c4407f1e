"""`kvpipe bench queue`: what dispatch through a RabbitMQ broker costs, and what it keeps when processes are killed."""
