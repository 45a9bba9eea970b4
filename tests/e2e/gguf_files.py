"""What tests that write GGUF files share."""


def write_out(writer):
    """Everything that was added, into the writer's file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
