"""Model memory on the host: builds models there, and moves models there while another program uses the device."""
