"""Stand-in for the arguments of vLLM's engine: any are accepted."""


class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model", required=True)
        return parser

    @staticmethod
    def from_cli_args(namespace):
        return namespace
