//! Generates the Markdown reference of all commands of a program from the texts of `--help`.

use std::fmt::Write;

use clap::{Arg, Command};

use super::program::GLOBAL_OPTIONS;

/// Returns a table of the options that several commands share. For every command, in the order of `--help`, a heading
/// with its usage and its own options follows. Options of all commands are left out. `cli` is the page of `unweight`:
/// options in its table of common options are linked there.
pub fn markdown(mut program: Command, cli: &str) -> String {
    program = program.disable_help_subcommand(true);
    program.build();
    let mut commands = Vec::new();
    leaves(&mut program, &mut commands);
    let common = Common::of(&commands, cli);
    let mut page = "\n## Common options\n\n| | |\n|---|---|\n".to_owned();
    common.rows.iter().for_each(|row| page += &row.line(true));
    page += "\n## Commands\n";
    commands.iter().for_each(|command| command.describe(&common, &mut page));
    page
}

/// Collects the commands without subcommands, in order.
fn leaves(program: &mut Command, found: &mut Vec<Leaf>) {
    for command in program.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
        if command.has_subcommands() {
            leaves(command, found);
            continue;
        }
        let usage = command.render_usage().to_string();
        let name = command.get_bin_name().and_then(|name| name.split_once(' ')).map_or("", |(_, name)| name);
        found.push(Leaf {
            name: name.to_owned(),
            about: command.get_about().map(|about| escaped(&about.to_string())).unwrap_or_default(),
            usage: arguments_of(&usage, command.get_bin_name().unwrap_or_default()),
            rows: arguments(command).into_iter().map(Row::of).collect(),
        });
    }
}

/// Returns what follows the names of program and command in a usage line, without the mark for options.
fn arguments_of(usage: &str, command: &str) -> String {
    let usage = usage.trim_start_matches("Usage: ").trim();
    let arguments = usage.strip_prefix(command).unwrap_or(usage).trim_start();
    arguments.strip_prefix("[OPTIONS]").unwrap_or(arguments).trim_start().to_owned()
}

/// A command without subcommands.
struct Leaf {
    name: String,
    about: String,
    usage: String,
    rows: Vec<Row>,
}

impl Leaf {
    fn describe(&self, common: &Common<'_>, page: &mut String) {
        let Self { name, about, usage, rows } = self;
        let _ = write!(page, "\n### {name}\n\n{about}.\n");
        if !usage.is_empty() {
            let _ = write!(page, "\n`{usage}`\n");
        }
        let (linked, rest): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| common.is_in_cli_page(row));
        let (shared, specific): (Vec<&Row>, Vec<&Row>) = rest.iter().partition(|row| common.has(row));
        let mut headings: Vec<_> = specific.iter().map(|row| row.heading.as_deref()).collect();
        headings.dedup();
        for heading in headings {
            let _ = write!(page, "\n| {} | |\n|---|---|\n", heading.unwrap_or_default());
            for row in specific.iter().filter(|row| row.heading.as_deref() == heading) {
                *page += &row.line(!common.has_values(row));
            }
        }
        for (rows, what) in [(shared, "[Common](#common-options)"), (linked, "[`unweight`](cli.md#common-options)")] {
            let names: Vec<_> = rows.iter().map(|row| format!("`{}`", row.name)).collect();
            if !names.is_empty() {
                let _ = writeln!(page, "\n{what}: {}", names.join(", "));
            }
        }
    }
}

/// An argument.
#[derive(Clone)]
struct Row {
    heading: Option<String>,
    /// `--output` or `<SOURCE>...`.
    name: String,
    /// `-o`, `--output <DIR>`.
    names: String,
    help: String,
    /// The possible values.
    values: String,
    default: String,
}

impl Row {
    fn of(argument: &Arg) -> Self {
        let name = argument.get_long().map_or_else(|| argument.to_string(), |long| format!("--{long}"));
        Self {
            heading: argument.get_help_heading().map(str::to_owned),
            name,
            names: names(argument),
            help: argument.get_help().map(|help| escaped(&help.to_string())).unwrap_or_default(),
            values: values(argument),
            default: default(argument),
        }
    }

    /// Whether both are the same option, possibly below different headings.
    fn is_same(&self, other: &Self) -> bool {
        (&self.names, &self.help, &self.values, &self.default)
            == (&other.names, &other.help, &other.values, &other.default)
    }

    fn line(&self, with_values: bool) -> String {
        let Self { names, help, default, .. } = self;
        let values = if with_values { self.values.as_str() } else { "" };
        format!("| {names} | {help}{values}{default} |\n")
    }
}

/// The options that several commands share, with the same help.
struct Common<'a> {
    rows: Vec<Row>,
    /// The table of common options on the page of `unweight`.
    cli: &'a str,
}

impl<'a> Common<'a> {
    /// Of several options with one name, selects the one that most commands have.
    fn of(commands: &[Leaf], cli: &'a str) -> Self {
        let all: Vec<&Row> = commands.iter().flat_map(|command| &command.rows).collect();
        let cli = cli.split("\n## ").find(|section| section.starts_with("Common options")).unwrap_or_default();
        let count = |row: &Row| all.iter().filter(|other| other.is_same(row)).count();
        let mut rows: Vec<Row> = Vec::new();
        for row in all.iter().filter(|row| count(row) > 1 && !cli.contains(&row.line(true))) {
            match rows.iter_mut().find(|listed| listed.name == row.name) {
                None => rows.push((*row).clone()),
                Some(listed) if count(row) > count(listed) => *listed = (*row).clone(),
                Some(_) => {}
            }
        }
        Self { rows, cli }
    }

    /// Whether the page of `unweight` has the option.
    fn is_in_cli_page(&self, row: &Row) -> bool {
        self.cli.contains(&row.line(true))
    }

    fn has(&self, row: &Row) -> bool {
        self.rows.iter().any(|listed| listed.is_same(row))
    }

    /// Whether the table lists the values of this option.
    fn has_values(&self, row: &Row) -> bool {
        self.rows.iter().any(|listed| listed.name == row.name && listed.values == row.values)
    }
}

/// Returns positional arguments, then options by heading.
fn arguments(command: &Command) -> Vec<&Arg> {
    let is_listed = |argument: &&Arg| {
        let common = argument.get_help_heading() == Some(GLOBAL_OPTIONS);
        !common && !argument.is_hide_set() && !["help", "version"].contains(&argument.get_id().as_str())
    };
    let mut found: Vec<&Arg> = command.get_arguments().filter(is_listed).collect();
    let mut headings = vec![None];
    headings.extend(found.iter().map(|argument| argument.get_help_heading()));
    let heading_index = |argument: &Arg| headings.iter().position(|&heading| heading == argument.get_help_heading());
    found.sort_by_key(|argument| (heading_index(argument), !argument.is_positional()));
    found
}

/// Formats names: `<SOURCE>...` or `-o`, `--output <DIR>`.
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

/// Formats the possible values with their help.
fn values(argument: &Arg) -> String {
    let values: Vec<_> = argument.get_possible_values().into_iter().filter(|value| !value.is_hide_set()).collect();
    if !argument.get_action().takes_values() || values.is_empty() {
        return String::new();
    }
    let value = |value: &clap::builder::PossibleValue| {
        let help = value.get_help().map(|help| format!(" ({})", escaped(&help.to_string()))).unwrap_or_default();
        format!("`{}`{help}", value.get_name())
    };
    format!(". Values: {}", values.iter().map(value).collect::<Vec<_>>().join(", "))
}

fn default(argument: &Arg) -> String {
    let values: Vec<_> = argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if !argument.get_action().takes_values() || values.is_empty() || argument.is_hide_default_value_set() {
        return String::new();
    }
    format!(" [default: {}]", escaped(&values.join(",")))
}

/// Escapes a plain help text for Markdown: `*` and `<` outside of backticks, and `|`.
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
