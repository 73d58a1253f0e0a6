"""The writer process, which never imports torch: its orders, its IPC, and the memory it shares with a rank."""
