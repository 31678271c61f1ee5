from megatron_ciera.launch import main

main()
