"""Model memory on the host: builds models there, and moves them there while another program uses the device."""
