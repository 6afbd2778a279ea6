// The pages beside curves and table.

import { alertsPage } from "./alerts.js";
import { diffPage } from "./diff.js";
import { layersPage } from "./layers.js";
import { mediaPage } from "./media.js";
import { runPage } from "./run.js";
import { sweepsPage } from "./sweep.js";
import { tasksPage } from "./tasks.js";

export const pages = { sweeps: sweepsPage(), tasks: tasksPage(), layers: layersPage(), media: mediaPage(), run: runPage(), diff: diffPage(), alerts: alertsPage() };
