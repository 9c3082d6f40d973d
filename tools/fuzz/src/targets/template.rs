//! Chat templates: programs that come with a model.

use crate::target::Target;
use ls_chat::{ChatTemplate, Message};
use std::time::SystemTime;

pub(crate) const TEMPLATE: Target = Target {
    words: &[
        "{{ ",
        " }}",
        "{% ",
        " %}",
        "{%- for ",
        "{% endfor %}",
        "{% if ",
        "{% endif %}",
        "messages",
        "loop.index",
        "range(99999)",
        "range(1000000000)",
        "content",
        "role",
        " ~ ",
        " * ",
        " ** ",
        "|indent(100000000)",
        "|tojson",
        "|join",
        "|trim",
        ".split()",
        ".rjust(1000000000)",
        ".center(99999999)",
        "[1:]",
        "[::-1]",
        "{% set x = x ~ x %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "namespace(",
        "raise_exception('no')",
        "strftime_now('%Y')",
        "\"%99999999d\"",
        "|format(1)",
        "'a' * 1000000000",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "not ",
        "'",
        "0x7fffffffffffffff",
        "9223372036854775807",
        "-1",
        "1e308",
        "|batch(99999999)",
        "|slice(99999999)",
        "|replace('', messages)",
        "lipsum(99)",
        "cycler(1)",
        "dict(a=1)",
        "bos_token",
        "{#",
        "#}",
        "{% raw %}",
        "{% generation %}",
        "{% break %}",
        "none",
    ],
    ..Target::new("template", "chat templates", |_| {
        let messages =
            [Message::new("system", "Be kind."), Message::new("user", "What is a tide?")];
        Box::new(move |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let Ok(template) = ChatTemplate::new(&text, "<s>", "</s>") else { return };
            let _ = template.render(&messages, SystemTime::UNIX_EPOCH);
        })
    })
};
