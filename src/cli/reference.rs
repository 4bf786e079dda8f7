//! A page about all commands of a program, as Markdown, from the texts of `--help`.

use std::fmt::Write;

use clap::{Arg, Command};

use super::program::EVERYWHERE;

/// A heading with usage and options for every command, in the order of `--help`. The options of all commands are left
/// out.
pub fn markdown(mut program: Command) -> String {
    program = program.disable_help_subcommand(true);
    program.build();
    let mut page = String::new();
    program.get_subcommands_mut().for_each(|command| describe(command, &mut page));
    page
}

fn describe(command: &mut Command, page: &mut String) {
    if command.is_hide_set() {
        return;
    }
    let usage = command.render_usage().to_string();
    let name = command.get_bin_name().and_then(|name| name.split_once(' ')).map_or("", |(_, name)| name);
    let about = command.get_about().map(|about| escaped(&about.to_string())).unwrap_or_default();
    let _ = write!(page, "\n### {name}\n\n{about}.\n");
    if command.has_subcommands() {
        command.get_subcommands_mut().for_each(|command| describe(command, page));
        return;
    }
    let _ = write!(page, "\n```text\n{}\n```\n", usage.trim_start_matches("Usage: ").trim_end());
    let arguments = arguments(command);
    let mut headings: Vec<_> = arguments.iter().map(|argument| argument.get_help_heading()).collect();
    headings.dedup();
    for heading in headings {
        let _ = write!(page, "\n| {} | |\n|---|---|\n", heading.unwrap_or("Arguments and options"));
        for argument in arguments.iter().filter(|argument| argument.get_help_heading() == heading) {
            let _ = writeln!(page, "| {} | {} |", names(argument), meaning(argument));
        }
    }
}

/// Positional arguments, then options by heading.
fn arguments(command: &Command) -> Vec<&Arg> {
    let own = |argument: &&Arg| {
        let common = argument.get_help_heading() == Some(EVERYWHERE);
        !common && !argument.is_hide_set() && !["help", "version"].contains(&argument.get_id().as_str())
    };
    let mut found: Vec<&Arg> = command.get_arguments().filter(own).collect();
    let mut headings = vec![None];
    headings.extend(found.iter().map(|argument| argument.get_help_heading()));
    let place = |argument: &Arg| headings.iter().position(|&heading| heading == argument.get_help_heading());
    found.sort_by_key(|argument| (place(argument), !argument.is_positional()));
    found
}

/// `<SOURCE>...` or `-o`, `--output <DIR>`.
fn names(argument: &Arg) -> String {
    if argument.is_positional() {
        return format!("`{argument}`");
    }
    let values: Vec<_> =
        argument.get_value_names().unwrap_or_default().iter().map(|name| format!(" <{name}>")).collect();
    let values = if argument.get_action().takes_values() { values.concat() } else { String::new() };
    let short = argument.get_short().map(|short| format!("`-{short}`, ")).unwrap_or_default();
    format!("{short}`--{}{values}`", argument.get_long().unwrap_or_default())
}

/// The help, possible values and the default.
fn meaning(argument: &Arg) -> String {
    let mut text = argument.get_help().map(|help| escaped(&help.to_string())).unwrap_or_default();
    let takes_values = argument.get_action().takes_values();
    let values: Vec<_> = argument.get_possible_values().into_iter().filter(|value| !value.is_hide_set()).collect();
    if takes_values && !values.is_empty() {
        let value = |value: &clap::builder::PossibleValue| {
            let help = value.get_help().map(|help| format!(" ({})", escaped(&help.to_string()))).unwrap_or_default();
            format!("`{}`{help}", value.get_name())
        };
        let _ = write!(text, ". Values: {}", values.iter().map(value).collect::<Vec<_>>().join(", "));
    }
    let defaults: Vec<_> = argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if takes_values && !defaults.is_empty() && !argument.is_hide_default_value_set() {
        let _ = write!(text, " [default: {}]", escaped(&defaults.join(",")));
    }
    text
}

/// Help texts are plain; outside of backticks, Markdown would take some characters for its own.
fn escaped(text: &str) -> String {
    let mut in_code = false;
    let mut escaped = String::new();
    for character in text.replace('\n', " ").chars() {
        in_code ^= character == '`';
        if character == '|' || !in_code && matches!(character, '*' | '<') {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}
